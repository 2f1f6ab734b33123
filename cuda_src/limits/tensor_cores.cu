// Peak rates of the instructions that the attention kernels use: the ceilings that `cufa bench` divides by. The loops of mma and
// ex2 touch no memory: only the unit under test can be the limit.
#include "primitives/mma.cuh"
#include "primitives/primitives.cuh"
#include "limits/random_operands.cuh"

static_assert(!(BFLOAT16 && TF32), "one kind of product at a time");

// Independent accumulators per warp: enough products in flight to cover the latency of each.
constexpr int TILES_M = 4, TILES_N = 4;

// mma.sync from registers. 4096 floating-point operations per product with 16-bit operands, 2048 with tf32.
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

// ex2.approx: the softmax needs one exponential per score, on a unit of its own.
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

// A plain streaming read, the ceiling of decoding, which reads every key and value once. 16 bytes per load, UNROLL loads in
// flight per thread.
constexpr int UNROLL = 8;

KERNEL read_limit(const vec4* in, u64 vectors, float* out) {
  const u64 thread = blockIdx.x * u64(blockDim.x) + threadIdx.x, threads = u64(gridDim.x) * blockDim.x;
  u32 bits = 0;
  for (u64 i = thread; i < vectors; i += UNROLL * threads) {
    vec4 x[UNROLL] = {};
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      if (i + j * threads < vectors) x[j] = ld_global<vec4>(in + i + j * threads);
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) bits ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (bits == 0x12345678u) st_global<float>(out + thread, 1.0f);  // practically never; keeps the loads
}
