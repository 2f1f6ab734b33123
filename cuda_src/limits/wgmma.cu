// The tensor-core peak of Hopper, by wgmma (mma.sync does not reach it: tensor_cores.cu). A from registers, B from shared memory,
// as in O += P V; random operands, because power limits the clock.
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/wgmma.cuh"
#include "limits/random_operands.cuh"
#include "wgmma/operands.cuh"

constexpr int N = 256, K_STEPS = 4;
constexpr int NUM_THREADS = 256;  // two warpgroups: one issues while the other's products drain

// 2 * 64 * 256 * 16 floating-point operations per product and warpgroup, K_STEPS products per iteration.
KERNEL __launch_bounds__(NUM_THREADS, 1) wgmma_limit(float* out, int iterations) {
  DYN_SMEM(smem);
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, B_smem = smem_address(smem);
  for (u32 i = threadIdx.x; i < wgmma_tile_bytes(N, 16 * K_STEPS) / 4; i += NUM_THREADS) {
    st_shared_u32(B_smem + 4 * i, random_operand<BFLOAT16, false>(thread + i * 977));
  }
  async_proxy_fence();  // wgmma reads through the async proxy, the stores went through the generic proxy
  block_sync();
  u32 A[4 * K_STEPS];
  for (int i = 0; i < 4 * K_STEPS; ++i) A[i] = random_operand<BFLOAT16, false>(thread * 64 + i);
  float C[N / 2] = {};
  const u64 B = k_major_descriptor(B_smem);
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
    wgmma_registers(C);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      Wgmma<N, BFLOAT16>::rs<true, false>(C, A[4 * k], A[4 * k + 1], A[4 * k + 2], A[4 * k + 3], B + k_major_step<N>(k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_registers(C);
  }
  float sum = 0;
  for (int i = 0; i < N / 2; ++i) sum += C[i];
  st_global<float>(out + thread, sum);
}
