// Online softmax of the rows that a lane shares.
//
// In an accumulator of mma.sync a row is spread over the four lanes of a quad; a lane has two rows of each 16-row fragment. ROWS
// = 2 * (number of 16-row fragments); row r of a lane is row r * 8 + lane / 4 of the warp.
//
// The subtracted maximum `m` need not be the true one: exp2(s - m) must not overflow, and each row is divided by its own sum at
// the end. So O is rescaled only if some maximum of the warp has grown by more than 2^SLACK. With 8, P <= 256: far below the
// limits of float16 and bfloat16, and their relative precision there is that at 1.
#pragma once
#include "shared/lanes.cuh"

// The maximum of a row that has seen no score: finite, so that -inf - m is never NaN.
constexpr float NO_SCORE = -3.0e38f;

// log-sum-exp (natural) of a row with maximum m, in units of log2, and sum l.
DEVICE float natural_lse(float m, float l) {
  return l == 0.0f ? NEG_INF : (m + lg2(l)) * LN_2;
}
// The same with float32 accuracy.
DEVICE float exact_lse(float m, float l) { return l == 0.0f ? NEG_INF : fmaf(m, LN_2, logf(l)); }

template <int ROWS, int SLACK = 8>
struct OnlineSoftmax {
  float m_scaled[ROWS];  // the subtracted maximum, m * scale_log2
  float l[ROWS];         // this lane's share of the row's sum of exp2(s * scale_log2 - m_scaled)

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      m_scaled[r] = NO_SCORE;
      l[r] = 0.0f;
    }
  }

  // Takes the row maxima of a new tile, reduced over the quad. True if O must be multiplied by `alpha`, which is not written
  // otherwise.
  DEVICE bool raise_max(const float (&m_tile)[ROWS], float scale_log2, float (&alpha)[ROWS]) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) grown |= m_tile[r] * scale_log2 > m_scaled[r] + SLACK;
    if (!warp_any(grown)) return false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float m_old = m_scaled[r];
      m_scaled[r] = fmaxf(m_old, m_tile[r] * scale_log2);
      alpha[r] = ex2(m_old - m_scaled[r]);  // 0 if this is the row's first finite score
      l[r] *= alpha[r];
    }
    return true;
  }

  // As raise_max(), but from this lane's maximum of each row. Maxima seldom grow: they are reduced over the quad only then.
  DEVICE bool raise_max_by_lanes(float (&m_lane)[ROWS], float scale_log2, float (&alpha)[ROWS]) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) grown |= m_lane[r] * scale_log2 > m_scaled[r] + SLACK;
    if (!warp_any(grown)) return false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m_lane[r] = quad_max(m_lane[r]);
    return raise_max(m_lane, scale_log2, alpha);
  }

  // One probability, not yet divided by the row's sum.
  DEVICE float exp(float s, float scale_log2, int r) {
    const float p = ex2(fmaf(s, scale_log2, -m_scaled[r]));
    l[r] += p;
    return p;
  }

  // l over the whole row. Then inverse_sum() is the factor of O (0 if the row saw no key) and lse() the natural-log LSE.
  DEVICE void reduce_sum() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) l[r] = quad_sum(l[r]);
  }
  DEVICE float inverse_sum(int r) const { return l[r] == 0.0f ? 0.0f : rcp(l[r]); }
  DEVICE float lse(int r) const { return natural_lse(m_scaled[r], l[r]); }

  // A logit, in units of log2, joins the denominator of a whole row. Returns the factor of O.
  DEVICE float join(int r, float logit) {
    const float m = fmaxf(m_scaled[r], logit), kept = ex2(m_scaled[r] - m);
    l[r] = fmaf(l[r], kept, ex2(logit - m));
    m_scaled[r] = m;
    return kept * inverse_sum(r);
  }
};
