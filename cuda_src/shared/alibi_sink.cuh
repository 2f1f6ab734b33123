// ALiBi slopes change scores; a sink joins the denominator of the softmax.
#pragma once
#include "shared/lengths.cuh"

// Slopes and sinks beyond ±1e30 count as ±1e30 (MAX_NUMBER in cufa/problem/scores.py): in units of log2, and times a distance,
// float32 holds them. NaN stays NaN: fminf() would hide it.
DEVICE float load_slope(const float* slope) {
  constexpr float MAX_NUMBER = 1.0e30f;
  const float x = ld_global<float>(slope), bounded = x > MAX_NUMBER ? MAX_NUMBER : x;
  return bounded < -MAX_NUMBER ? -MAX_NUMBER : bounded;
}
// A sink of -inf is none.
DEVICE float load_sink(const float* sink) {
  return ld_global<float>(sink) == NEG_INF ? NEG_INF : load_slope(sink);
}

// ALiBi subtracts slope * |i + diagonal - j| from the score of row i and key j. After it, scores are in units of log2.
struct Alibi {
  float slope;  // in units of log2
  int diagonal;

  DEVICE Alibi(float slope_, int diagonal_) : slope(slope_), diagonal(diagonal_) {}
  template <typename Params, typename Sequence>
  DEVICE Alibi(const Params& p, const Sequence& sequence, int head) : diagonal(int(diagonal_of(p, sequence))) {
    // Rows after the last packed sequence have no scores: any slope will do.
    const int index = min(sequence.sequence_index, p.batch - 1);
    slope = load_slope(p.alibi_slopes + i64(index) * p.alibi_stride + head) * LOG2_E;
  }

  // `row` and `key` are the lane's first. Scores at the same distance share the subtracted value.
  template <typename View>
  DEVICE void change(View S, float scale_log2, int row, int key) const {
    const float distance = float(row + diagonal - key);
    S.for_each([&](int row, int column, float& s) { s = changed(s, scale_log2, distance, row - column); });
  }
  // One score, whose distance is `farther` more than `distance`.
  DEVICE float changed(float s, float scale_log2, float distance, int farther) const {
    return fmaf(s, scale_log2, -(slope * fabsf(distance + float(farther))));
  }
};

// The factor that brings scores to units of log2.
template <typename Params>
DEVICE float softmax_scale(const Params& p) {
  if constexpr (ALIBI) return 1.0f;
  return p.scale_log2;
}

// The factor of row r of O at the end: 1 / l, where l includes the sink.
template <typename Params, typename Softmax>
DEVICE float row_factor(const Params& p, Softmax& softmax, int r, int head) {
  if constexpr (SINK) return softmax.join(r, load_sink(p.sink + head) * LOG2_E);
  return softmax.inverse_sum(r);
}
