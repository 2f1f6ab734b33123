// Probes of the primitives that only the decode kernels use, like primitive_probes.cu. sm_89 and later.
#include "primitives/float8.cuh"
#include "primitives/grid.cuh"
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
