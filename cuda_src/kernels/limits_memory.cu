// What the caches of this GPU can bring at best: bytes per second that stay in the L2 cache, and in shared memory.
// Reads alone, 16 bytes a lane, as wide as copies and fragments of the attention kernels are.
#include "primitives/primitives.cuh"

constexpr int UNROLL = 4;  // pieces in flight a thread

// UNROLL 16-byte pieces a thread, few enough to stay in the L2 cache, `rounds` times, copied to shared memory past the
// L1 cache: loads would find some of them there. A group of copies is under way while the one before is waited for.
KERNEL l2_limit(const vec4* in, int rounds, float* out) {
  DYN_SMEM(shared);
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const u32 vectors = UNROLL * threads, row_bytes = blockDim.x * 16;
  const u32 smem = smem_address(shared) + threadIdx.x * 16;
  for (int round = 0; round < rounds; ++round) {
    const u32 first = (thread + u32(round) * (vectors / 13 + 512)) % vectors;
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const u32 i = first + j * threads;
      cp_async_16(smem + j * row_bytes, in + (i < vectors ? i : i - vectors), true);
    }
    cp_async_commit();
    cp_async_wait<1>();
  }
  cp_async_wait<0>();
  if (ld_shared_u32(smem) == 0x12345678u) st_global<float>(out + thread, 1.0f);
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
