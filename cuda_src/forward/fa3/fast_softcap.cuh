// Cheaper ways to cap scores (shared/softcap.cuh), for rows that see all keys of a tile: several tanh with one reciprocal, and,
// near 0, a polynomial that joins the softmax's own arithmetic.
#pragma once
#include "shared/score.cuh"
#include "shared/softcap.cuh"

// The same of GROUP scores at once, given as x * 2 log2(e), with one reciprocal for all of them: what is left is the inverse of
// a product times the other factors. Factors lie in [2^-30, 1], clamped where tanh is 1 in float32, so that no product
// overflows. A NaN makes all of them NaN or -1 with a NaN beside it: for scores of one row that it sees.
template <int GROUP>
DEVICE void tanh_together(float* (&t)[GROUP]) {
  constexpr float LEAST = 0x1p-30f;
  float factor[GROUP], rest[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) factor[i] = fma_sat(ex2(*t[i]), LEAST, LEAST);
  if constexpr (GROUP == 2) {
    const float inverse = rcp(factor[0] * factor[1]);
    rest[0] = inverse * factor[1];
    rest[1] = inverse * factor[0];
  } else {
    const float low = factor[0] * factor[1], high = factor[2] * factor[3], inverse = rcp(low * high);
    const float of_low = inverse * high, of_high = inverse * low;
    rest[0] = of_low * factor[1];
    rest[1] = of_low * factor[0];
    rest[2] = of_high * factor[3];
    rest[3] = of_high * factor[2];
  }
#pragma unroll
  for (int i = 0; i < GROUP; ++i) *t[i] = fmaf(-2.0f * LEAST, rest[i], 1.0f);
}

// tanh(x) is x times a polynomial of x^2 with these coefficients, off by at most 2e-7 (not of it: of 1), where |x| <= NEAR_0: of
// three terms, and of four. (By number of terms.)
constexpr float NEAR_0[5] = {0, 0, 0, 0.3f, 0.5f};
constexpr float TANH_OVER_X[5][4] = {{}, {}, {}, {0.9999960099f, -0.3329747653f, 0.1252255531f},
                                     {0.9999976759f, -0.3332065416f, 0.1314513541f, -0.04337220812f}};

// A cap of scores near 0: no exponential, no reciprocal. `unit` is what a score is multiplied by to be x, `scale` what tanh(x) is.
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
  // What the score is to be multiplied by.
  DEVICE float factor(float s) const {
    const float square = s * s;
    float sum = factors[TERMS - 1];
#pragma unroll
    for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(square, sum, factors[i]);
    return sum;
  }
  DEVICE float operator()(float s) const { return s * factor(s); }
};

// The greatest magnitude among the lane's scores, in chains that wait for each other less. What is no number does not count.
template <typename View>
DEVICE float greatest_magnitude(View S) {
  float chain[4] = {};
  S.for_each([&](int row, int column, float s) {
    float& c = chain[row / 8 % 2 * 2 + column % 2];
    c = fmaxf(c, fabsf(s));
  });
  return fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
}

// Whether a lane's scores are near enough to 0. (Of other units, the seventh power is no number of full precision.)
template <int TERMS>
DEVICE bool is_near_0(float greatest, float unit) {
  return greatest * unit <= NEAR_0[TERMS] && unit > 1e-5f && unit < 1e4f;
}

DEVICE float unit_of(float softcap) {
  constexpr float LN_2 = 0.693147180559945309f;
  return softcap * (LN_2 / 2);
}

// The same where all scores of a warp are near 0, as most are under usual caps. False, and nothing is changed, where some are not.
template <typename View>
DEVICE bool cap_near_0(View S, float softcap) {
  const float unit = unit_of(softcap);
  if (warp_any(!is_near_0<4>(greatest_magnitude(S), unit))) return false;
  const CapNear0<4> cap(unit, 1.0f);
  S.for_each([&](int, int, float& s) { s = cap(s); });
  return true;
}

// The same where rows see all of these keys, four at a time: a third of the reciprocals' and exponentials' time less.
template <bool ON, bool MOSTLY_NEAR_0, typename View>
DEVICE void cap_seen_scores(View S, float softcap) {
  if constexpr (ON) {
    if (MOSTLY_NEAR_0 && cap_near_0(S, softcap)) return;
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) {
#pragma unroll
      for (int n = 0; n < View::TILES; n += 2) {
        float* four[4] = {&S.at(r, n, 0), &S.at(r, n, 1), &S.at(r, n + 1, 0), &S.at(r, n + 1, 1)};
        for (float* s : four) *s *= softcap;
        tanh_together(four);
      }
    }
  }
}

// The maxima and exponentials of S, whose scores are seen and near 0 and become capped in the same instructions: what a score is
// multiplied by has the softmax's scale in it, and its last product is that which the row's maximum is subtracted in. As a cap
// keeps the order of scores, of each row it is the maximum that is capped. `greatest` is the lane's greatest magnitude: where
// not even that would raise a maximum, nobody looks for the maxima. True when O must be multiplied by alpha.
template <int TERMS, typename View, typename Softmax>
DEVICE bool capped_softmax(View S, Softmax& softmax, float unit, float scale_log2, float greatest, float (&alpha)[View::ROWS]) {
  const CapNear0<TERMS> cap(unit, scale_log2);
  bool grown = false;
  if (warp_any(softmax.may_grow(cap(greatest)))) {
    float m_tile[View::ROWS];
    lane_maxima<true>(m_tile, S);
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) m_tile[r] = cap(quad_max(m_tile[r]));
    grown = softmax.raise_max(m_tile, 1.0f, alpha);
  }
#pragma unroll
  for (int n = 0; n < View::TILES; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      float& s = S.at(x / 2, n, x % 2);
      s = softmax.exp(s, cap.factor(s), x / 2);
    }
  }
  return grown;
}
