// Probes of TMA and wgmma on whole tiles, compiled for one shape each, whose results a test compares with NumPy: every N
// and every operand layout that a kernel may use. COLUMNS, DEPTH and BFLOAT16 arrive as constants.
#include "shared/element.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/tma.cuh"
#include "wgmma/operands.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

constexpr int K_STEPS = (DEPTH + 15) / 16;  // TMA fills the last one up with zeros, in columns of A and B, in rows of V
constexpr int A_BYTES = wgmma_tile_bytes(64, DEPTH), B_BYTES = wgmma_tile_bytes(COLUMNS, DEPTH);
constexpr int V_BYTES = wgmma_tile_bytes(16 * K_STEPS, COLUMNS);

// All atoms of a tile, on one barrier that already expects them. By one thread.
DEVICE void load_tile(u32 tile, const TensorMap& map, u32 barrier, int rows, int columns) {
  for (int a = 0; a < atoms(columns); ++a) {
    tma_load_4d(tile + a * rows * ATOM_ROW_BYTES, &map, barrier, a * ATOM_COLUMNS, 0, 0, 0);
  }
}

// D (64 x COLUMNS, float32) as a matrix, by the layout that wgmma.cuh states.
DEVICE void store_matrix(u32* out, const float (&d)[COLUMNS / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    st_global(out + row * COLUMNS + column, float_as_u32(d[i]));
  }
}

// One warpgroup, three matrices of 64 x COLUMNS: A B^T with A in shared memory; A B^T with A in registers; that plus A V,
// as attention accumulates. A is 64 x DEPTH, B is COLUMNS x DEPTH (k-major), V is DEPTH x COLUMNS (mn-major).
KERNEL __launch_bounds__(128, 1)
    probe_wgmma_tiles(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap A_map,
                      const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(smem);
  const u32 A = smem_address(smem), B = A + A_BYTES, V = B + B_BYTES, barrier = V + V_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  block_sync();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, A_BYTES + B_BYTES + V_BYTES);
    load_tile(A, A_map, barrier, 64, DEPTH);
    load_tile(B, B_map, barrier, COLUMNS, DEPTH);
    load_tile(V, V_map, barrier, 16 * K_STEPS, COLUMNS);
  }
  mbarrier_wait(barrier, 0);
  float D[COLUMNS / 2];
  wgmma_registers(D);
  wgmma_fence();
  wgmma_tiles_ss<COLUMNS, K_STEPS, SixteenBit<BFLOAT16>>(D, k_major_descriptor(A), k_major_descriptor(B));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(D);
  store_matrix(p.out, D);

  u32 A_rmem[4 * K_STEPS];
  load_swizzled_rows<64, K_STEPS>(A_rmem, A, warp * 16 + lane % 16, lane / 16);
  wgmma_registers(D);
  wgmma_registers(A_rmem);
  wgmma_fence();
  wgmma_tiles_rs<COLUMNS, K_STEPS, SixteenBit<BFLOAT16>>(D, A_rmem, k_major_descriptor(B));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(D);
  store_matrix(p.out + 64 * COLUMNS, D);

  wgmma_registers(D);
  wgmma_registers(A_rmem);
  wgmma_fence();
  wgmma_accumulate_values<COLUMNS, K_STEPS, SixteenBit<BFLOAT16>>(D, A_rmem, mn_major_descriptor<16 * K_STEPS>(V));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(D);
  store_matrix(p.out + 128 * COLUMNS, D);
}

// Boxes of DEPTH rows by 64 columns, at the coordinates given, through one barrier: phase by phase, and each
// phase by two announcing threads, the second of them late. A phase that ended with the first thread's arrival or with
// its half of the bytes would show the other half as it was, -1 everywhere.
KERNEL probe_tma_boxes(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap map,
                       const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  constexpr u32 BOX_BYTES = DEPTH * ATOM_ROW_BYTES, WORDS = BOX_BYTES / 4;
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), barrier = base + 2 * BOX_BYTES;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 2);
    mbarrier_init_fence();
  }
  block_sync();
  const u32 num_boxes = ld_global<u32>(p.in);
  for (u32 i = 0; i < num_boxes; i += 2) {
    for (u32 word = threadIdx.x; word < 2 * WORDS; word += blockDim.x) st_shared_u32(base + 4 * word, 0xffffffffu);
    async_proxy_fence();  // the copies may not overtake these stores
    block_sync();
    const u32 half = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      if (half == 1) {
        for (const u64 start = global_timer(); global_timer() - start < 20000;) {
        }
      }
      const u32* first = p.in + 1 + (i + half) * 4;
      mbarrier_arrive_expect_tx(barrier, BOX_BYTES);
      tma_load_4d(base + half * BOX_BYTES, &map, barrier, int(ld_global<u32>(first)), int(ld_global<u32>(first + 1)),
                  int(ld_global<u32>(first + 2)), int(ld_global<u32>(first + 3)));
    }
    warp_sync();
    mbarrier_wait(barrier, i / 2 % 2);
    // Row r's 16-byte unit u lies at u ^ (r % 8).
    for (u32 word = threadIdx.x; word < 2 * WORDS; word += blockDim.x) {
      const u32 row = word / 32 % DEPTH, unit = word / 4 % 8;
      const u32 from = base + word / 32 * ATOM_ROW_BYTES + (unit ^ row % 8) * 16 + word % 4 * 4;
      st_global(p.out + i * WORDS + word, ld_shared_u32(from));
    }
    block_sync();  // all have read before the boxes are overwritten
  }
}

// Boxes of DEPTH rows by 64 columns stored at the coordinates given: word w of box i is i * WORDS + w + 1. One buffer for all,
// written anew as soon as the store before has read it.
KERNEL probe_tma_store(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap map,
                       const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  constexpr u32 WORDS = DEPTH * ATOM_ROW_BYTES / 4;
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), num_boxes = ld_global<u32>(p.in);
  for (u32 i = 0; i < num_boxes; ++i) {
    for (u32 word = threadIdx.x; word < WORDS; word += blockDim.x) {
      const u32 row = word / 32, unit = word / 4 % 8;
      st_shared_u32(base + row * ATOM_ROW_BYTES + (unit ^ row % 8) * 16 + word % 4 * 4, i * WORDS + word + 1);
    }
    async_proxy_fence();  // the copy engine reads what ordinary stores wrote
    block_sync();
    if (threadIdx.x == 0) {
      const u32* first = p.in + 1 + i * 4;
      tma_store_4d(&map, base, int(ld_global<u32>(first)), int(ld_global<u32>(first + 1)), int(ld_global<u32>(first + 2)),
                   int(ld_global<u32>(first + 3)));
      bulk_commit();
      bulk_wait_read();
    }
    block_sync();  // no thread writes the buffer before all have read it
  }
}
