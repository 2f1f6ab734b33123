// Scalar arithmetic of the softmax.
#pragma once
#include "primitives/types.cuh"

#define NEG_INF u32_as_float(0xff800000u)

// ex2.approx.ftz.f32: 2^x, 2 ulp; ex2(-inf) = 0.
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32: log2(x); lg2(0) = -inf.
DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1/x, 1 ulp; rcp(0) = inf.
DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn.ftz.sat.f32: x * y + z, clamped to [0, 1]; 0 for NaN.
DEVICE float fma_sat(float x, float y, float z) {
  float d;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(x), "f"(y), "f"(z));
  return d;
}

// CUDA's fmaf, fmaxf (the other operand if one is NaN), fminf, and min, max of integers are used directly; the host twins provide
// the same names.
