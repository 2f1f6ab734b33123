// Peak read rates of the L2 cache and of shared memory. 16 bytes per lane, the width of the attention kernels' copies and
// fragments.
#include "primitives/primitives.cuh"

constexpr int UNROLL = 4;  // loads in flight per thread

// UNROLL 16-byte vectors per thread, few enough to stay in the L2 cache, read `rounds` times. Each round begins at another
// vector: otherwise an SM would find its own vectors in its L1 cache. Loads that bypass L1 (ld.global.cg) take as long on an
// H200. Copies by cp.async seem 1.5 times as fast, but a third of their sectors do not reach L2: they join another SM's request.
KERNEL l2_limit(const vec4* in, int rounds, float* out) {
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const u32 vectors = UNROLL * threads;
  u32 bits = 0;
  for (int round = 0; round < rounds; ++round) {
    const u32 first = (thread + u32(round) * (vectors / 13 + 512)) % vectors;
    vec4 x[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const u32 i = first + j * threads;
      x[j] = ld_global<vec4>(in + (i < vectors ? i : i - vectors));
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) bits ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (bits == 0x12345678u) st_global<float>(out + thread, 1.0f);  // practically never; keeps the loads
}

// Each lane reads its own 16 bytes of UNROLL rows, without bank conflicts. An iteration's address depends on the values that the
// previous iteration read. The step is always zero, but the compiler cannot know; otherwise it would read each row only once.
KERNEL shared_limit(float* out, int iterations) {
  DYN_SMEM(shared);
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, row_bytes = blockDim.x * 16;
  u32 smem = smem_address(shared) + threadIdx.x * 16;
  for (int j = 0; j < UNROLL; ++j) st_shared_vec4(smem + j * row_bytes, vec4{thread, u32(j), thread ^ j, 0});
  block_sync();
  u32 bits = 0;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    u32 step = 0;
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const vec4 x = ld_shared_vec4(smem + j * row_bytes);
      bits ^= x.x ^ x.y ^ x.z;
      step |= x.w;
    }
    smem += step;
    bits = bits * 3 + u32(iteration);
  }
  if (bits == 0x12345678u) st_global<float>(out + thread, 1.0f);  // practically never; keeps the loads
}
