// The argument of every forward kernel. cufa/kernels/params.py reads the structs from this text; a test compares every offset.
#pragma once
#include "primitives/primitives.cuh"

// With TRACE, one per work item (query block x head). The visited tiles are a range, and so are the clear tiles among them.
// (Irregular masks: TileTally counts the tiles.)
struct TraceRecord {
  u64 start_ns, end_ns;      // %globaltimer
  u32 sm;                    // %smid
  u32 q_block, head, batch;  // the work item
  u32 first_tile, tiles_visited, tiles_skipped;
  u32 first_clear, tiles_clear;  // of the visited tiles, those computed without a mask
  u32 thread_block;    // linear index of the thread block: a persistent block takes several work items
};

// Strides are in elements; the last axis is contiguous. Index order: batch, head, sequence.
struct Strides {
  i64 batch, head, seq;
};

// The parameters of an irregular mask besides its band (shared/irregular_mask.cuh). Builds for other masks do not read them.
struct MaskParams {
  const i32* runs;        // (2 or 4, sequences, heads, keys): lo, hi of the rows that a key is hidden from; then of a second run.
                          // Or bits: (sequences, heads, lines, words), `keys` words to a line (shared/bit_mask.cuh)
  const i32* prefix_of;   // (sequences), or null: a prefix for each sequence
  const i32* keep_of;     // (sequences), or null: kept keys for each sequence
  const i32* global_of;   // (sequences), or null: global tokens for each sequence
  i64 workspace;          // bytes of the workspace before the mask's part
  i32 sequences, heads, keys;  // of `runs`; 1 broadcasts
  i32 run_shift;          // row i of the problem is row i + run_shift of `runs`
  // If the pointer above is null: the value of all sequences. Else the step in its array from sequence to sequence: 0 if the
  // array has one value, 1 if it has one for each sequence.
  i32 prefix, keep, global_tokens;
  i32 run_shift_by_length;  // LENGTHS: run_shift grows by this times (keys - rows) of a sequence
};

struct AttentionParams {
  const void* q;  // (batch, heads, seqlen_q, head_dim)
  const void* k;  // (batch, kv_heads, seqlen_k, head_dim)
  const void* v;  // (batch, kv_heads, seqlen_k, head_dim)
  void* o;        // (batch, heads, seqlen_q, head_dim)
  float* lse;     // (batch, heads, seqlen_q) contiguous, natural log; null when not wanted
  void* workspace;
  TraceRecord* trace;  // TRACE: one per work item
  Strides q_stride, k_stride, v_stride, o_stride;
  i32 batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale_log2;     // softmax scale * log2(e), positive
  i32 heads_per_head_batch;  // heads of a head batch; persistent kernels: see PersistentItems
  i32 band_first, band_last;  // row i sees keys i + band_first ... i + band_last; read if MASK has that edge
  float softcap;  // SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e) (shared/softcap.cuh)
  i32 num_splits;  // SPLIT_KEYS: thread blocks that share the keys of a query block
  // A member whose comment begins with a choice (LENGTHS, ALIBI, SINK) is read only by builds with that choice.
  const i32* seqlens_q;  // LENGTHS == PADDED: (batch), rows of each sequence; null: all have seqlen_q
  const i32* seqlens_k;  // the same for keys
  const i32* cu_seqlens_q;  // LENGTHS == PACKED: (batch + 1), the first row of each sequence, and the end of the last
  const i32* cu_seqlens_k;  // the same for keys
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;  // SINK: (heads), natural log
  i32 total_q, total_k;  // LENGTHS == PACKED: rows and keys of the arrays
  i32 shift;  // ALIBI, LENGTHS: the diagonal, row i is at key i + shift. With LENGTHS band_first and band_last count from it
  i32 shift_by_length;  // LENGTHS: shift grows by this times (keys - rows) of a sequence
  i32 alibi_stride;  // ALIBI: elements from sequence to sequence
  MaskParams mask;
  u32* counters;  // one, zero between launches: persistent kernels that take work items from a counter (PersistentItems::take)
  const i32* block_order;  // irregular masks: query blocks from the longest to the shortest; null: from the last to the first
};

// Whether the lines of a mask's bits are keys, not rows (shared/bit_mask.cuh).
template <typename Params>
constexpr bool LINES_ARE_KEYS = false;
