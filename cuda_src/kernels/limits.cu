// What this GPU can do at best with the instructions that the attention kernels use: the ceilings that
// `cufa bench` divides by. No memory is touched in the loops, so nothing but the unit under test can be the limit.
#include "primitives/primitives.cuh"
#include "tiles/random_operands.cuh"

static_assert(!(BFLOAT16 && TF32), "one kind of product at a time");

// Independent accumulators a warp: enough products in flight to cover the latency of each.
constexpr int TILES_M = 4, TILES_N = 4;

// mma.sync from registers. 4096 floating-point operations a product with 16-bit operands, 2048 with tf32.
KERNEL mma_limit(float* out, int iterations) {
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  u32 A[TILES_M][4], B[TILES_N][2];
  float C[TILES_M][TILES_N][4] = {};
  for (int m = 0; m < TILES_M; ++m)
    for (int i = 0; i < 4; ++i) A[m][i] = random_operand<BFLOAT16, TF32>(thread * 64 + m * 4 + i);
  for (int n = 0; n < TILES_N; ++n)
    for (int i = 0; i < 2; ++i) B[n][i] = random_operand<BFLOAT16, TF32>(thread * 64 + 32 + n * 2 + i);

  for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        if constexpr (TF32) mma_m16n8k8_tf32(C[m][n], A[m], B[n][0], B[n][1]);
        else if constexpr (BFLOAT16) mma_m16n8k16_bf16(C[m][n], A[m], B[n][0], B[n][1]);
        else mma_m16n8k16_f16(C[m][n], A[m], B[n][0], B[n][1]);
      }
  }
  mma_fence();

  float sum = 0;  // stored, or the compiler would drop the loop
  for (int m = 0; m < TILES_M; ++m)
    for (int n = 0; n < TILES_N; ++n)
      for (int i = 0; i < 4; ++i) sum += C[m][n][i];
  st_global<float>(out + thread, sum);
}

// ex2.approx: one exponential a score is the softmax's share of the work, on a unit of its own.
constexpr int CHAINS = 16;

KERNEL exp2_limit(float* out, int iterations) {
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  float x[CHAINS];
  for (int i = 0; i < CHAINS; ++i) x[i] = float(hash(thread * CHAINS + i) & 0xffffu) * 0x1p-16f;

  for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) x[i] = ex2(-x[i]);  // the sign is free; the chain tends to 0.64
  }

  float sum = 0;
  for (int i = 0; i < CHAINS; ++i) sum += x[i];
  st_global<float>(out + thread, sum);
}
