// The argument of forward kernels whose keys are in a cache. k and v are (num_pages, kv_heads, page_size, head_dim); seqlen_k is
// the room of a sequence.
#pragma once
#include "shared/params.cuh"

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
