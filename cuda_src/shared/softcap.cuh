// The soft cap: a score s becomes cap * tanh(s / cap).
#pragma once
#include "primitives/primitives.cuh"

// tanh(x) of x * 2 log2(e), off by at most 2e-7. (tanh.approx is off by 5e-4: times a cap of 30, a bfloat16 result shows it.)
DEVICE float tanh_of(float x_scaled) { return fmaf(-2.0f, rcp(1.0f + ex2(x_scaled)), 1.0f); }

// Near 0 that is many units in the last place: here an odd polynomial. With it fa3 spills, and 16-bit inputs do not need it.
DEVICE float tanh_exact_near_0(float x_scaled) {
  constexpr float LN_2 = 0.693147180559945309f;
  const float x = x_scaled * (LN_2 / 2), square = x * x;
  const float tail = fmaf(square, fmaf(square, fmaf(square, 0.01724148f, -0.05304549f), 0.13325879f), -0.33333144f);
  return fabsf(x) < 0.5f ? fmaf(x * square, tail, x) : tanh_of(x_scaled);
}

// Softcap: s becomes tanh(s * scale / cap), in units of cap: the softmax's scale_log2 is then cap * log2(e). `softcap` is what
// s is multiplied by to be in the units of tanh_of().
template <bool ON, bool EXACT_NEAR_0 = false, typename View>
DEVICE void cap_scores(View S, float softcap) {
  if constexpr (ON) {
    S.for_each([&](int, int, float& s) { s = EXACT_NEAR_0 ? tanh_exact_near_0(s * softcap) : tanh_of(s * softcap); });
  }
}

// What the cap makes of a change of the score: the derivative of tanh where it is `t`. Where a mask has put -inf, 0.
DEVICE float cap_slope(float t) {
  const float finite = fmaxf(t, -1.0f);
  return fmaf(-finite, finite, 1.0f);
}
