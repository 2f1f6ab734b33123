// Band masks: which scores exist, and which key tiles of a head a query block visits. The device side of cufa/problem/mask.py.
//
// Row i sees key j if i + first <= j <= i + last. Which of the two edges exist is compiled in, because a test that cannot fail
// costs time; where the edges lie are values of the launch, so that all windows share one build. Masks beyond a band, from
// MASK_SETS on: irregular_mask.cuh.
#pragma once
#include "primitives/primitives.cuh"

// FULL: no edge. CAUSAL: the right edge. BAND: both. SETS: both, and tokens that the edges do not bind (a prefix, kept keys,
// global tokens). COLUMNS, COLUMNS2: both, and one or two runs of rows that each key is hidden from. BITS: a bit per score.
enum MaskKind { MASK_FULL, MASK_CAUSAL, MASK_BAND, MASK_SETS, MASK_COLUMNS, MASK_COLUMNS2, MASK_BITS };

// Irregular masks: the tiles that a block visits are no range. Each tile is tested.
constexpr bool is_irregular(MaskKind kind) { return kind >= MASK_SETS; }

// Key tiles of one query block: first ... end-1 are computed, of these clear_first ... clear_end-1 without a mask. If no tile is
// clear, both are `first`, and all tiles are right-masked.
struct TileRange {
  int total, first, end, clear_first, clear_end;

  DEVICE bool empty() const { return end <= first; }
  DEVICE bool is_clear(int j) const { return clear_first <= j && j < clear_end; }
};

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
