// Band masks: which scores exist, and which key tiles of a head a query block visits. The device side of cufa/problem/mask.py.
//
// Row i sees key j if i + first <= j <= i + last. Which of the two edges exist is compiled in, because a test that cannot fail
// costs time; where the edges lie are values of the launch, so that all windows share one build. Masks beyond a band, from
// MASK_SETS on: irregular_mask.cuh.
#pragma once
#include "primitives/primitives.cuh"

// FULL: no edge. CAUSAL: the right edge. BAND: both. SETS: both, and tokens that the edges do not bind (a prefix, kept keys,
// global tokens). COLUMNS, COLUMNS2: both, and one or two runs of rows that each key is hidden from.
enum MaskKind { MASK_FULL, MASK_CAUSAL, MASK_BAND, MASK_SETS, MASK_COLUMNS, MASK_COLUMNS2 };

// Irregular masks: the tiles that a block visits are no range. Each tile is tested.
constexpr bool is_looked_up(MaskKind kind) { return kind >= MASK_SETS; }

// What a range of tiles tests. Tiles are visited from the last to the first: the segments come in this order. Right-masked tiles
// test the right edge, the end of the keys and, if there is one, the left edge: a narrow band may have both edges in one tile.
// Left-masked tiles lie before the right edge of all their rows.
enum Segment { RIGHT_MASKED, CLEAR, LEFT_MASKED };

template <Segment SEGMENT>
struct SegmentTag {
  static constexpr Segment value = SEGMENT;
};

// Key tiles of one query block: first ... end-1 are computed, of these clear_first ... clear_end-1 without a mask. If no tile is
// clear, both are `first`, and all tiles are right-masked.
struct TileRange {
  int total, first, end, clear_first, clear_end;

  DEVICE bool empty() const { return end <= first; }
  DEVICE bool is_clear(int j) const { return clear_first <= j && j < clear_end; }
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

// The band of one head (or sequence). `first` and `last` are read if KIND has that edge.
template <MaskKind KIND>
struct Band {
  int rows, keys;  // of the sequence
  int first, last;  // row i sees keys i + first ... i + last

  // The keys that a row sees: [begin, end). 64-bit, because the sums may pass 2^31.
  DEVICE int keys_begin(int row) const {
    if constexpr (KIND != MASK_BAND) return 0;
    return among_keys(i64(row) + first);
  }
  DEVICE int keys_end(int row) const {
    if constexpr (KIND == MASK_FULL) return keys;
    return among_keys(i64(row) + 1 + last);
  }

  // The key tiles of a query block, in blocks of BR rows and BC keys. Without SKIP, tiles that no row sees are computed and
  // masked too.
  template <int BR, int BC, bool SKIP>
  DEVICE TileRange tiles(int q_block) const {
    const i64 block_row = i64(q_block) * BR;
    const int first_row = int(block_row), last_row = int(min(block_row + BR, i64(rows)) - 1);
    TileRange range;
    range.total = (keys - 1) / BC + 1;
    range.first = 0;
    range.end = range.total;
    if constexpr (KIND != MASK_FULL && SKIP) {
      const int begin = keys_begin(first_row), end = keys_end(last_row);  // keys that some row sees
      range.first = begin / BC;
      range.end = (end + BC - 1) / BC;
      if (KIND == MASK_BAND && begin >= end) range.first = range.end = 0;
    }
    range.clear_first = (keys_begin(last_row) + BC - 1) / BC;
    range.clear_end = keys_end(first_row) / BC;
    if (KIND == MASK_BAND && range.clear_first >= range.clear_end) range.clear_first = range.clear_end = range.first;
    return range;
  }

 private:
  DEVICE int among_keys(i64 key) const { return key < 0 ? 0 : key > keys ? keys : int(key); }
};

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
