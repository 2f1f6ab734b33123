// The only argument of every decode kernel. cufa/kernels/params.py parses this file; a test compares the offset of every member.
#pragma once
#include "shared/score_params.cuh"
#include "primitives/tma.cuh"

struct DecodeParams {
  alignas(64) TensorMap k_map;  // tensor maps of the caches, boxes of 16 rows; read if TMA_COPIES
  alignas(64) TensorMap v_map;
  alignas(64) const void* q;  // (batch, heads, tokens, head_dim)
  void* k_cache;  // (batch, kv_heads, capacity, head_dim), or PAGED (num_pages, kv_heads, page_size, head_dim)
  void* v_cache;
  const void* k_new;  // (batch, kv_heads, new_tokens, head_dim); read if APPEND
  const void* v_new;
  void* o;                   // (batch, heads, tokens, v_dim)
  float* lse;                // (batch, heads, tokens) contiguous, natural log; null: not wanted
  const i32* cache_seqlens;  // (batch): keys valid before the call; read if RAGGED
  const i32* block_table;    // (batch, max_pages); read if PAGED
  const float* k_scale;      // shape: decode/scales.cuh; read if FP8_CACHE
  const float* v_scale;
  float* partial;      // workspace: slots of partial results (decode/merge.cuh)
  u32* counters;       // one per warp of a work item, zero between launches
  TraceRecord* trace;  // see write_span_trace(); read if TRACE
  Strides q_stride, k_stride, v_stride, k_new_stride, v_new_stride, o_stride;  // PAGED: the caches' batch stride is per page
  i64 table_stride;
  i32 batch, heads, kv_heads, tokens, capacity, page_size, num_pages, new_tokens;
  i32 group_size;    // heads / kv_heads
  i32 row_blocks;    // blocks of BLOCK_Q rows that the group_size * tokens rows of a key/value head take
  i32 num_splits;    // fixed: splits per work item; balanced: shares of the batch's tiles, at most
  float scale_log2;  // softmax scale * log2(e), positive
  i32 split_tiles;   // fixed, not UNEVEN: tiles of each split (computed on the host: no division before the first load)
  i32 used_splits;   // fixed, not UNEVEN: splits that have tiles
  i32 left;          // MASK_BAND, MASK_SETS: number of keys that a token sees before its own key, at most the capacity
  float softcap;     // SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e)
  i32 min_shares;    // balanced, UNEVEN: at least this many of num_splits shares are used
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;          // SINK: (heads), natural log
  i32 alibi_stride;           // ALIBI: elements from sequence to sequence
  i32 keep;                   // MASK_SETS: the first `keep` keys stay visible to all later tokens
  i32 prefix;                 // MASK_SETS: every token sees the first `prefix` keys; at most `keep` unless EXEMPT_BY_SEQUENCE
  const void* tree;           // TREE: parents (batch, tokens), or bytes (batch, tokens, tokens)
  float fixed_max;            // SOFTMAX_MAX GIVEN, softmax_max null: the maximum of all heads, natural log
  float* key_norms;           // SOFTMAX_MAX BOUND without SOFTCAP: (batch, kv_heads), upper bounds of |k|; an append raises them
  const float* softmax_max;   // SOFTMAX_MAX GIVEN: (heads), natural log; null: fixed_max
  // EXEMPT_BY_SEQUENCE, as in MaskParams. Null: `keep`, `prefix` or `global_tokens` is the number of all sequences. Else this
  // member is the step from sequence to sequence in the array: 0 or 1.
  const i32* keep_of;
  const i32* prefix_of;
  const i32* global_of;
  i32 global_tokens;          // EXEMPT_BY_SEQUENCE: the first tokens of a sequence, which see every key
  i32 chunk;                  // MASK_COLUMNS: keys of a chunk
};

// The argument if SCORE. The new members follow the padding of DecodeParams.
struct ScoredDecodeParams : DecodeParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  ScoreArray array0, array1, array2, array3;
  float score_scale;  // softmax scale, applied before the score function; scale_log2 and softcap then assume a scale of 1
};
