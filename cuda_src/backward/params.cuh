// The argument of every backward kernel. cufa/kernels/params.py reads the struct from this text; a test compares every offset.
#pragma once
#include "shared/score_params.cuh"

struct BackwardParams {
  const void* dout;   // (batch, heads, seqlen_q, head_dim)
  const void* q;      // (batch, heads, seqlen_q, head_dim)
  const void* k;      // (batch, kv_heads, seqlen_k, head_dim)
  const void* v;      // (batch, kv_heads, seqlen_k, head_dim)
  const void* o;      // (batch, heads, seqlen_q, head_dim)
  const float* lse;   // (batch, heads, seqlen_q) contiguous, natural log
  const float* dlse;  // (batch, heads, seqlen_q) contiguous: the gradient of lse; null: zero
  void* dq;           // (batch, heads, seqlen_q, head_dim)
  void* dk;           // (batch, kv_heads, seqlen_k, head_dim)
  void* dv;           // (batch, kv_heads, seqlen_k, head_dim)
  void* workspace;    // 16-byte aligned: see backward/common/workspace.cuh
  TraceRecord* trace;  // TRACE: one per key block and key/value head
  Strides dout_stride, q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride;
  i32 batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;       // softmax scale, the last factor of dq and dk
  float scale_log2;  // softmax scale * log2(e), positive
  i32 band_first, band_last;  // row i sees keys i + band_first ... i + band_last; read if MASK has that edge
  float softcap;  // SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e) (shared/softcap.cuh)
  // A member whose comment begins with a choice (LENGTHS, ALIBI, SINK) is read only by builds with that choice.
  const i32* seqlens_q;  // LENGTHS == PADDED: (batch), rows of each sequence; null: all have seqlen_q
  const i32* seqlens_k;  // the same for keys
  const i32* cu_seqlens_q;  // LENGTHS == PACKED: (batch + 1), the first row of each sequence, and the end of the last
  const i32* cu_seqlens_k;  // the same for keys
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;  // SINK: (heads), natural log
  float* dsink;  // SINK: (heads), result
  i32 total_q, total_k;  // LENGTHS == PACKED: rows and keys of the arrays
  i32 shift;  // ALIBI, LENGTHS: the diagonal, row i is at key i + shift. With LENGTHS band_first and band_last count from it
  i32 shift_by_length;  // LENGTHS: shift grows by this times (keys - rows) of a sequence
  i32 alibi_stride;  // ALIBI: elements from sequence to sequence
  // BY_HEAD_BATCHES, LISTED_TICKETS: HeadBatches of backward/common/workspace.cuh.
  i32 heads_per_head_batch, whole_head_batches, head_batches_before, head_batches_converted;
  i32 strips_per_head;  // row strips of one key/value head: those of its query heads, each of which has whole tiles
  MaskParams mask;
};

// With a score function.
struct ScoredBackwardParams : BackwardParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  float* dscore0;  // the gradient of score0, contiguous; null: not wanted
  float* dscore1;
  float* dscore2;
  float* dscore3;
  ScoreArray array0, array1, array2, array3;
  float score_scale;
};

// With dropout: shared/dropout_params.cuh.
struct DroppedBackwardParams : BackwardParams {
  const u64* seed;
  u32 zeros_low, zeros_high;
  float kept_factor;
};
struct ScoredDroppedBackwardParams : ScoredBackwardParams {
  const u64* seed;
  u32 zeros_low, zeros_high;
  float kept_factor;
};

// A thread block keeps a key block, so it reads mask bits along a key: a line of the mask is a key.
template <>
constexpr bool LINES_ARE_KEYS<BackwardParams> = true;
template <>
constexpr bool LINES_ARE_KEYS<ScoredBackwardParams> = true;
template <>
constexpr bool LINES_ARE_KEYS<DroppedBackwardParams> = true;
template <>
constexpr bool LINES_ARE_KEYS<ScoredDroppedBackwardParams> = true;
