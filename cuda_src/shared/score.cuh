// Scores between the two products: the walk over key tiles, the mask, the row maxima, the exponentials, and the rounding to an
// operand of the second product. Written once for every accumulator that fragment_view.cuh can walk. The soft cap: softcap.cuh;
// ALiBi and sinks: alibi_sink.cuh.
#pragma once
#include "shared/fragment_view.cuh"
#include "shared/mask.cuh"
#include "shared/softmax.cuh"

// The tests of a range of tiles. Tiles are visited from the last to the first: segments come in the order of the enumerators.
// Right-masked tiles test the right edge, the end of the keys and, if there is one, the left edge: a narrow band may have both
// edges in one tile. Left-masked tiles lie before the right edge of all their rows.
enum Segment { RIGHT_MASKED, CLEAR, LEFT_MASKED };

template <Segment SEGMENT>
struct SegmentTag {
  static constexpr Segment value = SEGMENT;
};

// visit(j, segment) for tiles from `j` down to the first, in one loop per segment: the loop that does most of the work has no
// masks. (`visit` is a reference: a copy of the closure compiles to longer machine code.)
template <MaskKind KIND, typename Visit>
DEVICE void walk_tiles(int& j, const TileRange& tiles, const Visit& visit) {
  for (; j >= tiles.clear_end; --j) visit(j, SegmentTag<RIGHT_MASKED>{});
  for (; j >= tiles.clear_first; --j) visit(j, SegmentTag<CLEAR>{});
  if constexpr (KIND == MASK_BAND) {
    for (; j >= tiles.first; --j) visit(j, SegmentTag<LEFT_MASKED>{});
  }
}

// The columns of a tile that one row sees, counted from the lane's first column, with the tests of this segment. The 32-bit sums
// may wrap: the compared values are right in every tile that some row of its query block sees. (If tiles are not skipped, rows
// and keys must sum to less than 2^31.)
template <MaskKind KIND, Segment SEGMENT>
struct VisibleColumns {
  int begin, end;

  // `lane_column` is the lane's first column; its other columns lie at compile-time distances.
  DEVICE VisibleColumns(const Band<KIND>& band, int row, int first_key, int lane_column) {
    if constexpr (TESTS_BEGIN) begin = max(int(u32(row) + u32(band.first)), 0) - first_key - lane_column;
    if constexpr (TESTS_END) {
      const int hidden = KIND == MASK_FULL ? 0 : min(int(u32(row) + 1 + u32(band.last) - u32(band.keys)), 0);
      end = hidden + (band.keys - first_key) - lane_column;
    }
  }

  DEVICE bool operator()(int column) const {
    return (!TESTS_BEGIN || column >= begin) && (!TESTS_END || column < end);
  }

 private:
  static constexpr bool TESTS_BEGIN = KIND == MASK_BAND && SEGMENT != CLEAR;
  static constexpr bool TESTS_END = SEGMENT == RIGHT_MASKED;
};

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
