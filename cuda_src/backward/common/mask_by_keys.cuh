// The mask seen from a key block, for the backward: the query tiles that the block visits, and the hidden scores of S^T = K Q^T.
#pragma once
#include "shared/fragment_view.cuh"
#include "shared/schedule.cuh"

template <MaskKind KIND>
DEVICE int cut_to_rows(const Band<KIND>& band, i64 row) {
  return row < 0 ? 0 : row > band.rows ? band.rows : int(row);
}

// The rows that see a key: [begin, end).
template <MaskKind KIND>
DEVICE int rows_begin(const Band<KIND>& band, int key) {
  if constexpr (KIND == MASK_FULL) return 0;
  return cut_to_rows(band, i64(key) - band.last);
}
template <MaskKind KIND>
DEVICE int rows_end(const Band<KIND>& band, int key) {
  if constexpr (KIND != MASK_BAND) return band.rows;
  return cut_to_rows(band, i64(key) + 1 - band.first);
}

// The query tiles of BR rows in which some row sees a key of the block of BC keys. The range of clear tiles ignores keys past
// the end: if a block extends past the end, its kernel masks every tile.
template <int BR, int BC, MaskKind KIND>
DEVICE TileRange query_tiles(const Band<KIND>& band, int k_block) {
  const i64 block_key = i64(k_block) * BC;
  const int first_key = int(block_key), last_key = int(min(block_key + BC, i64(band.keys)) - 1);
  const int begin = rows_begin(band, first_key), end = rows_end(band, last_key);  // rows that see some key
  TileRange range;
  range.total = (band.rows - 1) / BR + 1;
  range.first = begin / BR;
  range.end = (end + BR - 1) / BR;
  if (begin >= end) range.first = range.end = 0;
  range.clear_first = (rows_begin(band, last_key) + BR - 1) / BR;
  range.clear_end = rows_end(band, first_key) / BR;
  if (begin >= end || range.clear_first >= range.clear_end) range.clear_first = range.clear_end = range.first;
  return range;
}

// The class of a query tile for a key block under an irregular mask: whether some head of the query group sees some score, and
// whether all heads see all. Keys past the end are not counted.
template <typename Params>
DEVICE TileClass class_of_query_tile(const Params& p, int k_block, int batch, int kv_head, int tile) {
  const int top = tile * BLOCK_Q, end = top + BLOCK_Q, left = k_block * BLOCK_KV;
  auto of_head = [&](int member) {
    const auto mask = irregular_mask(p, batch, kv_head, member);
    return mask.classify(top, min(end, rows_of(p, batch)), left, min(left + BLOCK_KV, keys_of(p, batch)), k_block);
  };
  TileClass is = of_head(0);
  if constexpr (MASK_KIND == MASK_BITS) {
    for (int member = 1; p.mask.heads > p.kv_heads && member < p.heads / p.kv_heads; ++member) {
      const TileClass own = of_head(member);
      is = {is.some || own.some, is.every && own.every};
    }
  }
  return {is.some, is.some && is.every && end <= rows_of(p, batch)};
}
// How many query tiles of a sequence the key block classifies.
template <typename Params>
DEVICE int classified_query_tiles(const Params& p, int k_block, int batch) {
  if constexpr (LENGTHS_KIND == DENSE) return (p.seqlen_q - 1) / BLOCK_Q + 1;
  const auto sequence = sequence_of(p, batch);
  return k_block * BLOCK_KV < sequence.keys() ? (sequence.rows() + BLOCK_Q - 1) / BLOCK_Q : 0;
}

// Which rows of a tile see one key, counted from the lane's first row. No row sees a key past the end.
template <MaskKind KIND>
struct VisibleRows {
  int begin, end;

  DEVICE VisibleRows(const Band<KIND>& band, int key, int lane_first_row) {
    begin = rows_begin(band, key) - lane_first_row;
    end = (key < band.keys ? rows_end(band, key) : 0) - lane_first_row;
  }

  DEVICE bool operator()(int row) const { return row >= begin && row < end; }
};

// Hidden scores of S^T become -inf, and so do the scores of keys past the end. A row of the fragment is a key; `key` is the
// lane's first.
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

// The same under an irregular mask. CUT: also hides rows past the end; without CUT, their scores are 0.
template <bool CUT = false, MaskKind KIND, typename Params, typename View>
DEVICE void hide_scores_by_keys(View S, const IrregularMask<KIND, Params>& mask, int key, int lane_first_row) {
  using Looked = IrregularMask<KIND, Params>;
  if constexpr (Looked::BITS) {
    hide_by_bits(S, mask.workspace.runs, mask.words_of_line(), key, mask.keys, lane_first_row, mask.rows);
    return;
  }
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const int j = key + 8 * r;
    const bool exists = j < mask.keys, all = Looked::SETS && j < mask.prefix;
    const int begin = all ? 0 : j - mask.last;
    int end = all || (Looked::SETS && j < mask.keep) ? mask.rows : j - mask.first + 1;
    if constexpr (CUT) end = min(end, mask.rows);
    const int first = begin - lane_first_row, behind = (exists ? end : 0) - lane_first_row;
    const int exempt = (exists ? mask.exempt : 0) - lane_first_row;
    u32 lo[2] = {}, length[2] = {};
#pragma unroll
    for (int run = 0; run < Looked::RUNS; ++run) {
      const vec2 x = ld_global<vec2>(mask.workspace.run(mask.first_run + run, j));
      lo[run] = x.x - u32(lane_first_row), length[run] = x.y;
      if constexpr (LENGTHS_KIND != DENSE) lo[run] -= u32(mask.run_offset);
    }
    S.for_each_in_row(r, [&](int row, float& s) {
      bool visible = (row >= first && row < behind) || (Looked::SETS && row < exempt);
#pragma unroll
      for (int run = 0; run < Looked::RUNS; ++run) visible = visible && u32(row) - lo[run] >= length[run];
      if (!visible) s = NEG_INF;
    });
  }
}
