// Probes of the primitives that only decode kernels and kernels for e4m3 use, like primitive_probes.cu. sm_89 and later.
#include "primitives/float8.cuh"
#include "primitives/grid.cuh"
#include "primitives/mma.cuh"
#include "primitives/primitives.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

KERNEL probe_cvt_f16x2_e4m3x2(const __grid_constant__ ProbeParams p) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  st_global<u32>(p.out + i, cvt_f16x2_e4m3x2(u16(ld_global<u32>(p.in + i))));
}

KERNEL probe_cvt_e4m3x2(const __grid_constant__ ProbeParams p) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  st_global<u32>(p.out + i, cvt_e4m3x2(u32_as_float(ld_global<u32>(p.in + 2 * i)), u32_as_float(ld_global<u32>(p.in + 2 * i + 1))));
}

// Ten words per lane (A, B, D), one product per block.
KERNEL probe_mma_e4m3(const __grid_constant__ ProbeParams p) {
  const u32 thread = blockIdx.x * 32 + threadIdx.x;
  u32 words[10];
  for (int i = 0; i < 10; ++i) words[i] = ld_global<u32>(p.in + thread * 10 + i);
  const u32 A[4] = {words[0], words[1], words[2], words[3]};
  float D[4] = {u32_as_float(words[6]), u32_as_float(words[7]), u32_as_float(words[8]), u32_as_float(words[9])};
  mma_m16n8k32_e4m3(D, A, words[4], words[5]);
  mma_fence();
  for (int i = 0; i < 4; ++i) st_global<float>(p.out + thread * 4 + i, D[i]);
}

// Three words per thread: lo, hi, selector.
KERNEL probe_byte_permute(const __grid_constant__ ProbeParams p) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  const u32* words = p.in + 3 * i;
  st_global<u32>(p.out + i, byte_permute(ld_global<u32>(words), ld_global<u32>(words + 1), ld_global<u32>(words + 2)));
}

// All threads count up one counter, in any order: what it ends at, then how many threads found each value.
KERNEL probe_atomic_inc_wrap(const __grid_constant__ ProbeParams p) {
  const u32 last = ld_global<u32>(p.in);
  const u32 old = atomic_inc_wrap(p.out, last);
  atomic_add(p.out + 1 + old, 1);
}
