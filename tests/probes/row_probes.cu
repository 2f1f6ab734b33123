// A probe of TMA's whole rows (tma_rows.cuh), like hopper_tile_probes.cu: ROWS and COLUMNS arrive as constants.
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/tma_rows.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// Boxes of ROWS whole rows, 128-byte pieces of a row one after the other, at the (row, head, batch) given.
KERNEL probe_tma_rows(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap map,
                      const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  constexpr u32 BOX_BYTES = ROWS * COLUMNS * 2, WORDS = BOX_BYTES / 4;
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), barrier = base + BOX_BYTES;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  block_sync();
  const u32 num_boxes = ld_global<u32>(p.in);
  for (u32 i = 0; i < num_boxes; ++i) {
    if (threadIdx.x == 0) {
      const u32* first = p.in + 1 + i * 3;
      mbarrier_arrive_expect_tx(barrier, BOX_BYTES);
      tma_load_5d(base, &map, barrier, 0, 0, int(ld_global<u32>(first)), int(ld_global<u32>(first + 1)),
                  int(ld_global<u32>(first + 2)));
    }
    warp_sync();
    mbarrier_wait(barrier, i % 2);
    // 16-byte unit u of the n-th piece lies at u ^ (n % 8).
    for (u32 word = threadIdx.x; word < WORDS; word += blockDim.x) {
      const u32 piece = word / 32, unit = word / 4 % 8;
      st_global(p.out + i * WORDS + word, ld_shared_u32(base + piece * 128 + (unit ^ piece % 8) * 16 + word % 4 * 4));
    }
    async_proxy_fence();  // the copy may not overtake these loads
    block_sync();         // all have read before the box is overwritten
  }
}
