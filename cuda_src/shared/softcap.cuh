// The soft cap: a score s becomes cap * tanh(s / cap).
#pragma once
#include "primitives/primitives.cuh"

// factor * tanh(x), given x * 2 log2(e); tanh is off by at most 2e-7. (The error of tanh.approx is 5e-4: times a cap of 30 it
// shows in bfloat16 results.)
DEVICE float tanh_of(float x_scaled, float factor = 1.0f) { return fmaf(-2.0f * factor, rcp(1.0f + ex2(x_scaled)), factor); }

// As tanh_of(), but an odd polynomial near 0: an error of 2e-7 is many units in the last place there. For float32 results only,
// as fa3 would spill.
DEVICE float tanh_exact_near_0(float x_scaled) {
  const float x = x_scaled * (LN_2 / 2), square = x * x;
  const float tail = fmaf(square, fmaf(square, fmaf(square, 0.01724148f, -0.05304549f), 0.13325879f), -0.33333144f);
  return fabsf(x) < 0.5f ? fmaf(x * square, tail, x) : tanh_of(x_scaled);
}

// The cap of scores near 0, without exponential and reciprocal: a score s becomes scale * tanh(unit * s). For |x| <= NEAR_0,
// tanh(x) is x times a polynomial of x^2 with these coefficients; error at most 2e-7. The index is the number of terms, 3 or 4.
constexpr float NEAR_0[5] = {0, 0, 0, 0.3f, 0.5f};
constexpr float TANH_OVER_X[5][4] = {{}, {}, {}, {0.9999960099f, -0.3329747653f, 0.1252255531f},
                                     {0.9999976759f, -0.3332065416f, 0.1314513541f, -0.04337220812f}};
template <int TERMS>
struct CapNear0 {
  float factors[TERMS];

  DEVICE CapNear0(float unit, float scale) {
    float power = unit * scale;
#pragma unroll
    for (int i = 0; i < TERMS; ++i) {
      factors[i] = TANH_OVER_X[TERMS][i] * power;
      power *= unit * unit;
    }
  }
  // The capped score is s * factor(s).
  DEVICE float factor(float s) const {
    const float square = s * s;
    float sum = factors[TERMS - 1];
#pragma unroll
    for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(square, sum, factors[i]);
    return sum;
  }
  DEVICE float operator()(float s) const { return s * factor(s); }
};

// Whether the polynomial serves scores of magnitudes up to `greatest`. (For other units, unit^7 loses precision in float32.)
template <int TERMS>
DEVICE bool is_near_0(float greatest, float unit) {
  return greatest * unit <= NEAR_0[TERMS] && unit > 1e-5f && unit < 1e4f;
}

// The greatest magnitude among the lane's scores; four accumulators shorten the dependency chain. NaN is ignored.
template <typename View>
DEVICE float greatest_magnitude(View S) {
  float chain[4] = {};
  S.for_each([&](int row, int column, float s) {
    float& c = chain[row / 8 % 2 * 2 + column % 2];
    c = fmaxf(c, fabsf(s));
  });
  return fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
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
