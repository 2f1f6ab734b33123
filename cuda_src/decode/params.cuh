// The one argument of every decode kernel. cufa/kernels/params.py reads the structure from here: a test compares every offset.
#pragma once
#include "shared/score_params.cuh"
#include "primitives/tma.cuh"

struct DecodeParams {
  alignas(64) TensorMap k_map;  // of the caches, boxes of 16 rows; read if TMA_COPIES
  alignas(64) TensorMap v_map;
  alignas(64) const void* q;  // (batch, heads, tokens, head_dim)
  void* k_cache;  // (batch, kv_heads, capacity, head_dim), or PAGED (num_pages, kv_heads, page_size, head_dim)
  void* v_cache;
  const void* k_new;  // (batch, kv_heads, new_tokens, head_dim); read if APPEND
  const void* v_new;
  void* o;                   // as q
  float* lse;                // (batch, heads, tokens) contiguous, natural log; null: not wanted
  const i32* cache_seqlens;  // (batch): keys valid before the call; read if RAGGED
  const i32* block_table;    // (batch, max_pages); read if PAGED
  const float* k_scale;      // (kv_heads), or as decode/scales.cuh says; read if FP8_CACHE
  const float* v_scale;
  float* partial;      // see decode/merge.cuh
  u32* counters;       // one per warp of a work item, zero between launches
  TraceRecord* trace;  // see write_span_trace(); read if TRACE
  Strides q_stride, k_stride, v_stride, k_new_stride, v_new_stride, o_stride;  // batch: of the caches, from page to page if PAGED
  i64 table_stride;
  i32 batch, heads, kv_heads, tokens, capacity, page_size, num_pages, new_tokens;
  i32 group_size;    // heads / kv_heads
  i32 row_blocks;    // blocks of BLOCK_Q rows that the group_size * tokens rows of a key/value head take
  i32 num_splits;    // fixed: of a sequence; balanced: shares of all tiles
  float scale_log2;  // softmax scale * log2(e), positive
  i32 split_tiles;   // fixed, not RAGGED: tiles of each split (the kernel's first load does not wait for a division)
  i32 used_splits;   // fixed, not RAGGED: splits that have tiles
  i32 left;          // MASK_BAND, MASK_SETS: keys before its own that a token sees, at most the capacity
  float softcap;     // SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e)
  i32 min_shares;    // balanced, RAGGED: at least this many of num_splits shares are used
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;          // SINK: (heads), natural log
  i32 alibi_stride;           // ALIBI: elements from sequence to sequence
  i32 keep;                   // MASK_SETS: keys before this one stay visible to all later tokens
  i32 prefix;                 // MASK_SETS: every token sees keys before this one; at most `keep`
  const void* tree;           // TREE: parents (batch, tokens), or bytes (batch, tokens, tokens)
  float fixed_max;            // SOFTMAX_MAX GIVEN without softmax_max: of all heads, natural log
  float* key_norms;           // SOFTMAX_MAX BOUND without SOFTCAP: (batch, kv_heads), bounds of |k|; an append raises them
  const float* softmax_max;   // SOFTMAX_MAX GIVEN: (heads), natural log; null: fixed_max
};

// SCORE. Its members follow the padding of DecodeParams.
struct ScoredDecodeParams : DecodeParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  ScoreArray array0, array1, array2, array3;
  float score_scale;  // softmax scale: a score function takes scores times it. scale_log2 and softcap are of a scale of 1
};
