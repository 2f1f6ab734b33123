// e4m3, the 8-bit float with four bits of exponent and three of mantissa (sm_89).
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/decode_host.h"
#else

// cvt.rn.f16x2.e4m3x2: exact. The lower byte goes to the lower half.
DEVICE u32 cvt_f16x2_e4m3x2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

// cvt.rn.satfinite.e4m3x2.f32: `lo` goes to the lower byte of 16 bits. Beyond 448, infinity included, becomes 448 with its sign.
DEVICE u32 cvt_e4m3x2(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

// prmt.b32: byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes hi:lo.
DEVICE u32 byte_permute(u32 lo, u32 hi, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(selector));
  return r;
}
#endif  // __CUDACC__
