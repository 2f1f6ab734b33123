// Segments of the key tiles of a query block: ranges that need the same tests of a band mask.
#pragma once
#include "shared/mask.cuh"

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
