// Probes of what the backward on Hopper adds, like hopper_probes.cu: bulk copies without a tensor map, sums by the copy
// engine, and wgmma with k across the rows of B or of A.
#include "primitives/bulk_copy.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/wgmma_transposed.cuh"
#include "wgmma/operands.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// By one thread: `words` words into shared memory. All threads see them when the barrier says so.
DEVICE void load_words(u32 target, const u32* source, u32 words, u32 barrier) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  block_sync();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, words * 4);
    bulk_load(target, source, words * 4, barrier);
  }
  mbarrier_wait(barrier, 0);
}

// Every block adds its 128 numbers to the first 128 sums, and the last 64 of them once more to the 64 behind.
KERNEL probe_bulk_add(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), thread = threadIdx.x;
  load_words(base, p.in + blockIdx.x * 128, 128, base + 512);
  if (thread != 0) return;
  float* sums = reinterpret_cast<float*>(p.out);
  bulk_add_f32(sums, base, 512);
  bulk_commit();
  bulk_add_f32(sums + 128, base + 256, 256);
  bulk_commit();
  bulk_wait();
}

// One warpgroup: A (64 x 64) V (64 x 32), both in shared memory as wgmma takes them: the words come swizzled.
KERNEL probe_wgmma_transposed(const __grid_constant__ ProbeParams p) {
  constexpr u32 TILE_WORDS = 64 * 128 / 4;
  DYN_SMEM(smem);
  const u32 A = smem_address(smem), V = A + TILE_WORDS * 4;
  load_words(A, p.in, 2 * TILE_WORDS, V + TILE_WORDS * 4);
  float D[16];
  wgmma_registers(D);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const u64 a = k_major_descriptor(A) + k_major_step<64>(k), v = mn_major_descriptor<64>(V + 64) + mn_major_step(k);
    if (k == 0) {
      WgmmaTransposedB<32, true>::ss<false>(D, a, v);
    } else {
      WgmmaTransposedB<32, true>::ss<true>(D, a, v);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(D);
  for (int i = 0; i < 16; ++i) st_global(p.out + threadIdx.x * 16 + i, float_as_u32(D[i]));
}
