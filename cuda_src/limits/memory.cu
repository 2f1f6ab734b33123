// What the caches of this GPU can bring at best: bytes per second that stay in the L2 cache, and in shared memory.
// Reads alone, 16 bytes a lane, as wide as copies and fragments of the attention kernels are.
#include "primitives/primitives.cuh"

constexpr int UNROLL = 4;  // loads in flight a thread

// UNROLL 16-byte pieces a thread, few enough to stay in the L2 cache, `rounds` times. Each round begins elsewhere: an SM
// that read its own pieces again, or soon after, would find them in its L1 cache. Loads that pass L1 by (ld.global.cg)
// took as long on an H200. Copies by cp.async looked half as fast again and were not: of their sectors, a profiler
// counted two thirds in L2, the others having joined a request of another SM on the way.
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
  if (bits == 0x12345678u) st_global<float>(out + thread, 1.0f);  // as good as never, but the loads must be made
}

// Every lane its own 16 bytes of UNROLL rows, without bank conflicts. Where an iteration reads follows from what the one
// before has read: the step is always zero, but only the memory knows. A compiler that knew the rows, even as the
// remainder of a counter, would read each once and keep it.
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
  if (bits == 0x12345678u) st_global<float>(out + thread, 1.0f);  // as good as never, but the loads must be made
}
