// Scores of new tokens that are a tree (shared/tree.cuh).
#pragma once
#include "forward/cache.cuh"
#include "shared/tree.cuh"

static_assert(!TREE || (CACHED && MASK == MASK_FULL && !ALIBI), "a tree takes the place of a mask, and says no distances");

// Hides new tokens that a row does not see. `new_key`: the lane's first column, counted from the first new token.
template <typename View>
DEVICE void hide_tree(View S, const AttentionParams& params, int sequence, int row, int new_key) {
  const CacheParams& p = cache_of(params);
  // Rows past the end, and rows after the last packed sequence, are not stored.
  int token[View::ROWS];
  u64 seen[View::ROWS];
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) token[r] = min(row + r * 8, p.tree_tokens - 1);
  WarpTree<TREE, 64>(p.tree, min(sequence, p.batch - 1), p.tree_tokens, lane_id()).of(seen, token, lane_id());
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
#pragma unroll
    for (int n = 0; n < View::TILES; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int key = new_key + n * 8 + c;
        if (key >= 0 && (key >= 64 || (seen[r] >> key & 1) == 0)) S.at(r, n, c) = NEG_INF;
      }
    }
  }
}
