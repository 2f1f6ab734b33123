// Scores between the two products: the mask, the row maxima, the exponentials, and the rounding to an operand of the second
// product. Written once for every accumulator that fragment_view.cuh can walk. The soft cap: softcap.cuh; ALiBi and sinks:
// alibi_sink.cuh.
#pragma once
#include "shared/fragment_view.cuh"
#include "shared/segments.cuh"
#include "shared/softmax.cuh"

// Scores that the mask hides become -inf. `row` is the lane's first row.
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

// The maximum of each row over this lane's columns. TWO_CHAINS: even and odd columns apart shorten the dependency chain.
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

// S becomes P, not yet divided by the row sums, in 8-column tiles first ... first + COUNT - 1.
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
