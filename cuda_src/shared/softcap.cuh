// The soft cap: a score s becomes cap * tanh(s / cap).
#pragma once
#include "primitives/primitives.cuh"

// tanh(x), given x * 2 log2(e); error at most 2e-7. (The error of tanh.approx is 5e-4: times a cap of 30 it shows in bfloat16
// results.)
DEVICE float tanh_of(float x_scaled) { return fmaf(-2.0f, rcp(1.0f + ex2(x_scaled)), 1.0f); }

// tanh(x) / x, given x * x, for |x| <= 0.5; absolute error of tanh at most 2e-7.
DEVICE float tanh_over_x(float square) {
  return fmaf(square, fmaf(square, fmaf(square, -0.04337220812f, 0.1314513541f), -0.3332065416f), 0.9999976759f);
}

// As tanh_of(), by an odd polynomial near 0, where 2e-7 is many units in the last place. For float32 results only: fa3 would
// spill.
DEVICE float tanh_exact_near_0(float x_scaled) {
  constexpr float LN_2 = 0.693147180559945309f;
  const float x = x_scaled * (LN_2 / 2), square = x * x;
  const float tail = fmaf(square, fmaf(square, fmaf(square, 0.01724148f, -0.05304549f), 0.13325879f), -0.33333144f);
  return fabsf(x) < 0.5f ? fmaf(x * square, tail, x) : tanh_of(x_scaled);
}

// s becomes tanh(s * scale / cap), in units of cap: the softmax's scale_log2 is cap * log2(e). `softcap` brings s to the units of
// tanh_of().
template <bool ON, bool EXACT_NEAR_0 = false, typename View>
DEVICE void cap_scores(View S, float softcap) {
  if constexpr (ON) {
    S.for_each([&](int, int, float& s) { s = EXACT_NEAR_0 ? tanh_exact_near_0(s * softcap) : tanh_of(s * softcap); });
  }
}

// The derivative of tanh where its value is `t`; 0 where a mask has put -inf.
DEVICE float cap_slope(float t) {
  const float finite = fmaxf(t, -1.0f);
  return fmaf(-finite, finite, 1.0f);
}
