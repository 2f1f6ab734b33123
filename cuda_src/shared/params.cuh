// The one argument of every forward kernel. cufa/build/params.py reads the structures from here: a test compares every
// offset.
#pragma once
#include "primitives/primitives.cuh"

// Written once per work item (query block x head) by a build with TRACE on. The tiles visited lie side by side, and so do
// the clear ones among them: the class of every tile follows. (Not where a mask is more than a band: TileTally.)
struct TraceRecord {
  u64 start_ns, end_ns;      // %globaltimer
  u32 sm;                    // %smid
  u32 q_block, head, batch;  // which work item
  u32 first_tile, tiles_visited, tiles_skipped;
  u32 first_clear, tiles_clear;  // of the visited ones, those computed without a mask
  u32 thread_block;    // linear block index: persistent kernels do several items per block
};

// Strides are in elements; the last axis is contiguous. Index order: batch, head, sequence.
struct Strides {
  i64 batch, head, seq;
};

// What a mask has beside its band (shared/irregular_mask.cuh): read where MASK says so.
struct MaskParams {
  const i32* runs;        // (2 or 4, sequences, heads, keys): lo and hi of the run of rows that a key is hidden from; and of another
  const i32* prefix_of;   // a number for each sequence; likewise the next two
  const i32* keep_of;
  const i32* global_of;
  i64 workspace;          // bytes of the workspace before what prepare_mask() leaves there
  i32 sequences, heads, keys;  // of `runs`; one sequence or head is all of them's
  i32 run_shift;          // row i is row i + run_shift of `runs`
  i32 prefix, keep, global_tokens;  // of all sequences; where there is a pointer: 0 if its first number is all of them's, else 1
};

struct AttentionParams {
  const void* q;  // (batch, heads, seqlen_q, head_dim)
  const void* k;  // (batch, kv_heads, seqlen_k, head_dim)
  const void* v;  // (batch, kv_heads, seqlen_k, head_dim)
  void* o;        // (batch, heads, seqlen_q, head_dim)
  float* lse;     // (batch, heads, seqlen_q) contiguous, natural log; null when not wanted
  void* workspace;
  TraceRecord* trace;  // one per work item; read only when TRACE is on
  Strides q_stride, k_stride, v_stride, o_stride;
  i32 batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale_log2;     // softmax scale * log2(e), positive
  i32 heads_per_group;  // persistent kernels, MASK_CAUSAL: see PersistentItems
  i32 band_first, band_last;  // row i sees keys i + band_first ... i + band_last; read where MASK has that edge
  float softcap;  // read when SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e) (shared/score.cuh)
  i32 num_splits;  // read when SPLIT_KEYS: thread blocks that share out the keys of a query block
  // Read where the switch that comes first is on: shared/lengths.cuh, shared/score.cuh.
  const i32* seqlens_q;  // LENGTHS == PADDED: (batch), rows of each sequence; null: all have seqlen_q
  const i32* seqlens_k;  // likewise keys
  const i32* cu_seqlens_q;  // LENGTHS == PACKED: (batch + 1), where the rows of each sequence begin and the last end
  const i32* cu_seqlens_k;  // likewise keys
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;  // SINK: (heads), natural log
  i32 total_q, total_k;  // LENGTHS == PACKED: rows and keys of the arrays
  i32 shift;  // where row 0 stands among the keys: row i is at key i + shift; ALIBI. With LENGTHS, band_first and
  i32 shift_by_length;  // band_last count from there, and shift grows by this times (keys - rows) of a sequence
  i32 alibi_stride;  // ALIBI: elements from sequence to sequence
  MaskParams mask;
  u32* counters;  // one, zero between launches: persistent kernels whose items' lengths are not known (PersistentItems::take)
  const i32* block_order;  // masks that are looked up: query blocks from the longest to the shortest; null: from the last to the first
};
