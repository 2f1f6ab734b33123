// Cheaper ways to cap scores (shared/softcap.cuh), for rows that see all keys of a tile: four tanh with one reciprocal, and,
// near 0, a polynomial that joins the softmax's own arithmetic.
#pragma once
#include "shared/score.cuh"
#include "shared/softcap.cuh"

// tanh of four scores, given as x * 2 log2(e), with one reciprocal: 1 / a is 1 / (a b c d) times b c d. Factors are clamped
// to [2^-30, 1], where tanh is 1 in float32, so that no product overflows. One NaN makes all four NaN or -1: the scores must be
// visible scores of one row.
DEVICE void tanh_of_four(float* (&t)[4]) {
  constexpr float LEAST = 0x1p-30f;
  float factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) factor[i] = fma_sat(ex2(*t[i]), LEAST, LEAST);
  const float low = factor[0] * factor[1], high = factor[2] * factor[3], inverse = rcp(low * high);
  const float of_low = inverse * high, of_high = inverse * low;
  const float rest[4] = {of_low * factor[1], of_low * factor[0], of_high * factor[3], of_high * factor[2]};
#pragma unroll
  for (int i = 0; i < 4; ++i) *t[i] = fmaf(-2.0f * LEAST, rest[i], 1.0f);
}

DEVICE float unit_of(float softcap) {
  return softcap * (LN_2 / 2);
}

// Caps the scores of a warp by the polynomial, if all are near 0; else returns false and changes nothing.
template <typename View>
DEVICE bool cap_near_0(View S, float softcap) {
  const float unit = unit_of(softcap);
  if (warp_any(!is_near_0<4>(greatest_magnitude(S), unit))) return false;
  const CapNear0<4> cap(unit, 1.0f);
  S.for_each([&](int, int, float& s) { s = cap(s); });
  return true;
}

// Caps scores of a clear tile, four with one reciprocal.
template <bool MOSTLY_NEAR_0, typename View>
DEVICE void cap_clear_scores(View S, float softcap) {
  if (MOSTLY_NEAR_0 && cap_near_0(S, softcap)) return;
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < View::TILES; n += 2) {
      float* four[4] = {&S.at(r, n, 0), &S.at(r, n, 1), &S.at(r, n + 1, 0), &S.at(r, n + 1, 1)};
      for (float* s : four) *s *= softcap;
      tanh_of_four(four);
    }
  }
}

// Softmax of a clear tile whose scores are near 0, capped in the same instructions: the cap's factor includes the softmax's
// scale, and the last product also subtracts the row's maximum. A cap keeps the order of scores, so only the maximum of each
// row is capped. `greatest` is the lane's greatest magnitude: if it would not raise a maximum, the maxima are not computed.
// True if O must be multiplied by alpha.
template <int TERMS, typename View, int SLACK>
DEVICE bool capped_softmax(View S, OnlineSoftmax<View::ROWS, SLACK>& softmax, float unit, float scale_log2, float greatest,
                           float (&alpha)[View::ROWS]) {
  const CapNear0<TERMS> cap(unit, scale_log2);
  bool grown = false;
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) grown |= cap(greatest) > softmax.m_scaled[r] + SLACK;
  if (warp_any(grown)) {
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
