// Random operands in registers, for kernels that measure the peak rate of the tensor cores. Random bits draw more power than
// zeros, and a GPU at its power limit lowers its clocks: no real kernel reaches a peak measured on zeros.
#pragma once
#include "primitives/primitives.cuh"

// A cheap integer hash: operands differ from lane to lane.
DEVICE u32 hash(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Two random 16-bit floats (or one tf32) of random sign and mantissa and an exponent near one.
template <bool IS_BFLOAT16, bool IS_TF32>
DEVICE u32 random_operand(u32 seed) {
  const u32 bits = hash(seed);
  if (IS_TF32) return (bits & 0x807fe000u) | 0x3f000000u;
  if (IS_BFLOAT16) return (bits & 0x807f807fu) | 0x3f003f00u;
  return (bits & 0x83ff83ffu) | 0x38003800u;
}
