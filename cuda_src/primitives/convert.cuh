// Conversions between float32 and 16-bit bit patterns, round to nearest even; bytes of words.
#pragma once
#include "primitives/types.cuh"

DEVICE u32 float_as_u32(float x) { return __float_as_uint(x); }
DEVICE float u32_as_float(u32 x) { return __uint_as_float(x); }

// cvt.rn.f16x2.f32: `lo` goes to the lower half.
DEVICE u32 cvt_f16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// cvt.rn.satfinite.f16x2.f32: beyond 65504, infinity included, becomes 65504 with its sign.
DEVICE u32 cvt_f16x2_satfinite(float lo, float hi) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// cvt.rn.bf16x2.f32
DEVICE u32 cvt_bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// cvt.f32.f16: exact.
DEVICE float cvt_f32_f16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}

// bfloat16 is the upper half of a float32: exact.
DEVICE float cvt_f32_bf16(u16 x) { return u32_as_float(u32(x) << 16); }

// prmt.b32: byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes hi:lo; with 8 in the selector, that byte's
// highest bit in all its places.
DEVICE u32 byte_permute(u32 lo, u32 hi, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(selector));
  return r;
}
