// A tree of new tokens (speculative decoding): a token sees the keys before the first of them, its ancestors and itself.
// cufa/problem/tree.py says the same.
#pragma once
#include "primitives/primitives.cuh"

enum TreeKind { NO_TREE, TREE_PARENTS, TREE_MATRIX };

// The new tokens that token `token` sees, as bits. `tree`: PARENTS (batch, tokens) int32, each before its child, else a root;
// MATRIX (batch, tokens, tokens), bytes that are 0 for a hidden token. At most 64 tokens.
template <int KIND>
DEVICE u64 tree_bits(const void* tree, int batch, int tokens, int token) {
  u64 seen = u64(1) << token;
  if constexpr (KIND == TREE_PARENTS) {
    const i32* parents = static_cast<const i32*>(tree) + i64(batch) * tokens;
#pragma unroll 1
    for (int at = token; at >= 0;) {
      seen |= u64(1) << at;
      const int parent = int(ld_global<u32>(parents + at));
      at = parent < at ? parent : -1;
    }
  } else {
    const char* row = static_cast<const char*>(tree) + (i64(batch) * tokens + token) * tokens;
#pragma unroll 1
    for (int at = 0; at < token; ++at) {
      if (ld_global<char>(row + at) != 0) seen |= u64(1) << at;
    }
  }
  return seen;
}
