// Probes of sums in global memory, semaphores and stmatrix, like primitive_probes.cu. sm_90.
#include "primitives/maximum.cuh"
#include "primitives/primitives.cuh"
#include "primitives/reduction.cuh"
#include "primitives/semaphore.cuh"
#include "primitives/stmatrix.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// Every thread adds the seven numbers of its lane to the same seven sums, which begin on a multiple of 16 bytes: four at a
// time, and one.
KERNEL probe_red_add(const __grid_constant__ ProbeParams p) {
  const u32* in = p.in + (blockIdx.x * blockDim.x + threadIdx.x) * 7;
  float* sum = reinterpret_cast<float*>(p.out) + threadIdx.x % 4 * 8;
  float v[7];
  for (int i = 0; i < 7; ++i) v[i] = u32_as_float(ld_global<u32>(in + i));
  red_add_f32x4(sum, v[0], v[1], v[2], v[3]);
  for (int i = 4; i < 7; ++i) red_add_f32(sum + i, v[i]);
}

// Every thread gives its number to one of four maxima.
KERNEL probe_red_max(const __grid_constant__ ProbeParams p) {
  red_max_u32(p.out + threadIdx.x % 4, ld_global<u32>(p.in + blockIdx.x * blockDim.x + threadIdx.x));
}

// Every thread adds its number of 64 bits to one of four sums.
KERNEL probe_red_add_u64(const __grid_constant__ ProbeParams p) {
  red_add_u64(p.out + threadIdx.x % 4 * 2, ld_global<u64>(p.in + (blockIdx.x * blockDim.x + threadIdx.x) * 2));
}

// Blocks of two warps take turns: each reads what the block before has written, and writes what that becomes. Out: the
// counter, then the words as every block left them.
KERNEL probe_semaphore(const __grid_constant__ ProbeParams p) {
  const u32 thread = thread_id(), block = blockIdx.x, before = block * 64 + thread;
  if (thread == 0) {
    while (ld_acquire_gpu(p.out) < block * 3) {
    }
  }
  block_sync();
  const u32 word = block == 0 ? ld_global<u32>(p.in + thread) : ld_global<u32>(p.out + 1 + before - 64);
  st_global<u32>(p.out + 1 + before, word * 3 + 1);
  block_sync();
  if (thread == 0) red_release_gpu_add(p.out, 3);
}

// Four matrices each way, their rows addressed out of order; then what lies in shared memory, row by row.
KERNEL probe_stmatrix(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 lane = threadIdx.x, base = smem_address(smem), row = (lane * 5 + 3) % 32 * 16;
  const vec4 v = ld_global<vec4>(p.in + lane * 4);
  const u32 r[4] = {v.x, v.y, v.z, v.w};
  stmatrix_x4(base + row, r);
  stmatrix_x4_trans(base + 512 + row, r);
  warp_sync();
  for (int i = 0; i < 2; ++i) st_global<vec4>(p.out + (i * 32 + lane) * 4, ld_shared_vec4(base + i * 512 + lane * 16));
}
