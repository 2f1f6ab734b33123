// Keys in a cache, contiguous or in pages: the lengths of sequences.
#pragma once
#include "shared/lengths.cuh"
#include "shared/pages.cuh"
#include "shared/score_params.cuh"

// k and v are (num_pages, kv_heads, page_size, head_dim); seqlen_k is the room of a sequence.
struct CacheParams : AttentionParams {
  const i32* cache_seqlens;  // (batch): keys valid before the call; null: all have seqlen_k
  const i32* block_table;    // (batch, max_pages); null: a contiguous cache
  const void* k_new;         // rows as in q, which become the last keys of their sequence; null: nothing is appended
  const void* v_new;
  Strides k_new_stride, v_new_stride;
  const void* tree;          // TREE: (batch, tree_tokens) or (batch, tree_tokens, tree_tokens)
  i64 table_stride;
  i32 page_size, num_pages, tree_tokens;
};

// As ScoredParams (shared/score_params.cuh).
struct ScoredCacheParams : CacheParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  ScoreArray array0, array1, array2, array3;
  float score_scale;
};

// The parameters of a build with a cache.
DEVICE const CacheParams& cache_of(const AttentionParams& p) { return static_cast<const CacheParams&>(p); }

// Keys of a sequence before new tokens are appended.
DEVICE int keys_before(const CacheParams& p, int sequence) {
  return p.cache_seqlens == nullptr ? p.seqlen_k : within(ld_global<i32>(p.cache_seqlens + sequence), p.seqlen_k);
}

// sequence_of() of a CACHED build. If new tokens are appended, each query has one.
DEVICE RaggedSequence cached_sequence(const AttentionParams& params, int index) {
  const CacheParams& p = cache_of(params);
  int rows, first_row = 0;
  if constexpr (LENGTHS_KIND == PACKED) {
    first_row = within(ld_global<i32>(p.cu_seqlens_q + index), p.total_q);
    if (index == p.batch) return {index, 0, 0, p.total_q - first_row, 0, first_row, 0};
    rows = max(within(ld_global<i32>(p.cu_seqlens_q + index + 1), p.total_q) - first_row, 0);
  } else {
    rows = p.seqlens_q == nullptr ? p.seqlen_q : within(ld_global<i32>(p.seqlens_q + index), p.seqlen_q);
  }
  const int keys = keys_before(p, index);
  return {index, rows, p.k_new == nullptr ? keys : min(keys + rows, p.seqlen_k), LENGTHS_KIND == PACKED ? rows : p.seqlen_q, 0,
          first_row, 0};
}
