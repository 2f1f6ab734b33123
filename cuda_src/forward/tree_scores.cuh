// Scores of new tokens that are a tree (shared/tree.cuh).
#pragma once
#include "forward/cache.cuh"
#include "shared/bit_mask.cuh"
#include "shared/tree.cuh"

static_assert(!TREE || (CACHED && MASK == MASK_FULL && !ALIBI), "a tree takes the place of a mask, and says no distances");

// Which of 32 keys a row sees, from key `first` on, counted from the first new token: earlier keys, and the new tokens of `seen`.
DEVICE u32 seen_from(u64 seen, int first) {
  const int word = first >> 5;
  const auto of = [&](int w) { return w < 0 ? 0xffffffff : w == 0 ? u32(seen) : w == 1 ? u32(seen >> 32) : 0; };
  return u32((u64(of(word + 1)) << 32 | of(word)) >> (first & 31));
}

// Hides new tokens that a row does not see, of the first `tokens`, and keys past them. `new_key`: the lane's first column,
// counted from the first new token.
template <typename View>
DEVICE void hide_unseen(View S, const u64 (&seen)[View::ROWS], int tokens, int new_key) {
  const u64 exist = tokens < 64 ? (u64(1) << tokens) - 1 : ~u64(0);
  constexpr int TILES = ScoreBits<View>::TILES;
  ScoreBits<View> visible;
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < View::TILES / TILES; ++i) visible.bits[r][i] = seen_from(seen[r] & exist, new_key + i * TILES * 8);
  }
  visible.hide(S);
}

// The same, where each warp makes what its rows see.
template <typename View>
DEVICE void hide_tree(View S, const AttentionParams& params, int sequence, int row, int new_key) {
  const CacheParams& p = cache_of(params);
  // Rows past the end, and rows after the last packed sequence, are not stored.
  int token[View::ROWS];
  u64 seen[View::ROWS];
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) token[r] = min(row + r * 8, p.tree_tokens - 1);
  WarpTree<TREE, 64>(p.tree, min(sequence, p.batch - 1), p.tree_tokens, lane_id()).of(seen, token, lane_id());
  hide_unseen(S, seen, 64, new_key);
}
