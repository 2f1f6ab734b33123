// What becomes of scores between the two products: a score change, the mask, the row maxima, the exponentials and the
// rounding to an operand of the second product. Written once, for every accumulator that fragment_view.cuh can walk.
#pragma once
#include "shared/fragment_view.cuh"
#include "mma/fragments.cuh"
#include "shared/lengths.cuh"
#include "shared/mask.cuh"
#include "shared/softmax.cuh"

// tanh(x) of x * 2 log2(e), off by at most 2e-7. (tanh.approx is off by 5e-4: times a cap of 30, a bfloat16 result shows it.)
DEVICE float tanh_of(float x_scaled) { return fmaf(-2.0f, rcp(1.0f + ex2(x_scaled)), 1.0f); }

// Near 0 that is many units in the last place: here an odd polynomial. With it fa3 spills, and 16-bit inputs do not need it.
DEVICE float tanh_exact_near_0(float x_scaled) {
  constexpr float LN_2 = 0.693147180559945309f;
  const float x = x_scaled * (LN_2 / 2), square = x * x;
  const float tail = fmaf(square, fmaf(square, fmaf(square, 0.01724148f, -0.05304549f), 0.13325879f), -0.33333144f);
  return fabsf(x) < 0.5f ? fmaf(x * square, tail, x) : tanh_of(x_scaled);
}

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

// Softcap: s becomes tanh(s * scale / cap), in units of cap: the softmax's scale_log2 is then cap * log2(e). `softcap` is what
// s is multiplied by to be in the units of tanh_of().
template <bool ON, bool EXACT_NEAR_0 = false, typename View>
DEVICE void cap_scores(View S, float softcap) {
  if constexpr (ON) {
    S.for_each([&](int, int, float& s) { s = EXACT_NEAR_0 ? tanh_exact_near_0(s * softcap) : tanh_of(s * softcap); });
  }
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

// What the cap makes of a change of the score: the derivative of tanh where it is `t`. Where a mask has put -inf, 0.
DEVICE float cap_slope(float t) {
  const float finite = fmaxf(t, -1.0f);
  return fmaf(-finite, finite, 1.0f);
}

// ALiBi takes slope |i + diagonal - j| off the score of row i and key j. With it, scores are in units of log2 from here on.
struct Alibi {
  float slope;  // in units of log2
  int diagonal;

  DEVICE Alibi(float slope_, int diagonal_) : slope(slope_), diagonal(diagonal_) {}
  template <typename Params, typename Sequence>
  DEVICE Alibi(const Params& p, const Sequence& sequence, int head) : diagonal(int(diagonal_of(p, sequence))) {
    constexpr float LOG2_E = 1.44269504088896341f;
    // What lies behind the last sequence has no slope, and no scores.
    const int number = min(sequence.number, p.batch - 1);
    slope = ld_global<float>(p.alibi_slopes + i64(number) * p.alibi_stride + head) * LOG2_E;
  }

  // `row` and `key` are the lane's first. Scores at one distance share what is taken off them.
  template <typename View>
  DEVICE void change(View S, float scale_log2, int row, int key) const {
    const float distance = float(row + diagonal - key);
    S.for_each([&](int row, int column, float& s) { s = changed(s, scale_log2, distance, row - column); });
  }
  // One score, so many farther than the lane's first.
  DEVICE float changed(float s, float scale_log2, float distance, int farther) const {
    return fmaf(s, scale_log2, -(slope * fabsf(distance + float(farther))));
  }
};

// What scores are multiplied by to be in units of log2.
template <typename Params>
DEVICE float softmax_scale(const Params& p) {
  if constexpr (ALIBI) return 1.0f;
  return p.scale_log2;
}

// What row r of O is multiplied by in the end: 1 / l. With a sink, that has joined l.
template <typename Params, typename Softmax>
DEVICE float row_factor(const Params& p, Softmax& softmax, int r, int head) {
  constexpr float LOG2_E = 1.44269504088896341f;
  if constexpr (SINK) return softmax.join(r, ld_global<float>(p.sink + head) * LOG2_E);
  return softmax.inverse_sum(r);
}

// Scores that the mask hides become -inf. `row` is the lane's first.
template <Segment SEGMENT, MaskKind KIND, typename View>
DEVICE void hide_scores(View S, const Band<KIND>& mask, int row, int first_key, int lane_column) {
  if constexpr (SEGMENT != CLEAR) {
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) {
      const VisibleColumns<KIND, SEGMENT> visible(mask, row + 8 * r, first_key, lane_column);
      S.for_each_in_row(r, [&](int column, float& s) {
        if (!visible(column)) s = NEG_INF;
      });
    }
  }
}

// The same where S was computed transposed: rows of the fragment are keys, `key` the lane's first. Keys past the end are
// hidden too.
template <MaskKind KIND, typename View>
DEVICE void hide_scores_by_keys(View S, const Band<KIND>& mask, int key, int lane_first_row) {
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const VisibleRows<KIND> visible(mask, key + 8 * r, lane_first_row);
    S.for_each_in_row(r, [&](int row, float& s) {
      if (!visible(row)) s = NEG_INF;
    });
  }
}

// The maximum of each row over this lane's columns. Even and odd columns apart make two chains that wait for each other less.
template <bool TWO_CHAINS, typename View>
DEVICE void lane_maxima(float (&m)[View::ROWS], View S) {
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    float chain[2] = {S.at(r, 0, 0), S.at(r, 0, 1)};
    S.for_each_in_row(r, [&](int column, float s) {
      const int c = TWO_CHAINS ? column % 2 : 0;
      if (column > c) chain[c] = fmaxf(chain[c], s);
    });
    m[r] = TWO_CHAINS ? fmaxf(chain[0], chain[1]) : chain[0];
  }
}

// The same of their bits as integers, of which sm_90 compares three in one instruction (VIMNMX3). Integers order scores that are
// not negative; among negative ones only they have an order of their own.
template <typename View>
DEVICE void lane_tops(int (&top)[View::ROWS], View S) {
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    int chain[2] = {int(float_as_u32(S.at(r, 0, 0))), int(float_as_u32(S.at(r, 0, 1)))};
#pragma unroll
    for (int n = 1; n + 1 < View::TILES; n += 2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        chain[c] = max(max(chain[c], int(float_as_u32(S.at(r, n, c)))), int(float_as_u32(S.at(r, n + 1, c))));
      }
    }
    if constexpr (View::TILES % 2 == 0) {
      chain[0] = max(max(chain[0], int(float_as_u32(S.at(r, View::TILES - 1, 0)))), int(float_as_u32(S.at(r, View::TILES - 1, 1))));
    }
    top[r] = max(chain[0], chain[1]);
  }
}

// S becomes P, not yet divided by the sums, in the columns of 8-column tiles first ... first + COUNT - 1.
template <int COUNT, typename View, typename Softmax>
DEVICE void exponentials(View S, int first, Softmax& softmax, float scale_log2) {
#pragma unroll
  for (int i = 0; i < View::ROWS / 2; ++i) {
#pragma unroll
    for (int x = 0; x < 4 * COUNT; ++x) {
      float& s = S.at(2 * i + x / 2 % 2, first + x / 4, x % 2);
      s = softmax.exp(s, scale_log2, 2 * i + x / 2 % 2);
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

// Register h of the A operand that columns 16k ... 16k + 15 of a 16-row tile become: row h % 2, columns h / 2. An accumulator
// has the layout of an A operand already.
template <bool BF16, typename View>
DEVICE u32 operand_pair(View P, int m_tile, int k, int h) {
  const int r = 2 * m_tile + h % 2, n = 2 * k + h / 2;
  return pack_16bit<BF16>(P.at(r, n, 0), P.at(r, n, 1));
}
