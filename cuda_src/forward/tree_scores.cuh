// Scores of new tokens that are a tree (shared/tree.cuh).
#pragma once
#include "forward/cache.cuh"
#include "shared/bit_mask.cuh"
#include "shared/tree.cuh"

static_assert(!TREE || (CACHED && MASK == MASK_FULL && !ALIBI), "a tree takes the place of a mask, and says no distances");

// Hides new tokens that a row does not see, of the first `tokens`, and keys past them. `new_key`: the lane's first column,
// counted from the first new token.
template <typename View>
DEVICE void hide_unseen(View S, const u64 (&seen)[View::ROWS], int tokens, int new_key) {
  const u64 exist = tokens < 64 ? (u64(1) << tokens) - 1 : ~u64(0);
  constexpr int STEP = ScoreBits<View>::TILES * 8, WORDS = (View::TILES * 8 + 31) / 32 + 1;
  ScoreBits<View> visible;
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const u64 own = seen[r] & exist;
    u32 words[WORDS];  // of 32 keys, from the one that holds new_key on: all earlier keys, new tokens, no key past them
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {  // sums, not nested conditions: those become branches
      const int word = (new_key >> 5) + i;
      words[i] = (word < 0 ? 0xffffffff : 0) | (word == 0 ? u32(own) : 0) | (word == 1 ? u32(own >> 32) : 0);
    }
#pragma unroll
    for (int at = 0; at < View::TILES * 8; at += STEP) {
      const u64 two = u64(words[at / 32 + 1]) << 32 | words[at / 32];
      visible.bits[r][at / STEP] = u32(two >> ((new_key & 31) + at % 32));
    }
  }
  visible.hide(S);
}

// The same for kernels without a TreeLoader: each warp computes what its rows see.
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
