// The one argument of every backward kernel. cufa/build/params.py reads the structure from here: a test compares every
// offset.
#pragma once
#include "shared/params.cuh"

struct BackwardParams {
  const void* dout;   // (batch, heads, seqlen_q, head_dim)
  const void* q;      // (batch, heads, seqlen_q, head_dim)
  const void* k;      // (batch, kv_heads, seqlen_k, head_dim)
  const void* v;      // (batch, kv_heads, seqlen_k, head_dim)
  const void* o;      // (batch, heads, seqlen_q, head_dim)
  const float* lse;   // (batch, heads, seqlen_q) contiguous, natural log
  const float* dlse;  // likewise: the gradient of lse; null when nothing depends on it
  void* dq;           // (batch, heads, seqlen_q, head_dim)
  void* dk;           // (batch, kv_heads, seqlen_k, head_dim)
  void* dv;           // (batch, kv_heads, seqlen_k, head_dim)
  void* workspace;    // 16-byte aligned: see backward/common/workspace.cuh
  TraceRecord* trace;  // one per key block and key/value head; read only when TRACE is on
  Strides dout_stride, q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride;
  i32 batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;       // softmax scale: what dq and dk are multiplied by in the end
  float scale_log2;  // softmax scale * log2(e), positive
  i32 band_first, band_last;  // row i sees keys i + band_first ... i + band_last; read where MASK has that edge
  float softcap;  // read when SOFTCAP: softmax scale / cap * 2 log2(e); scale_log2 is then cap * log2(e) (shared/score.cuh)
  // Read where the switch that comes first is on: shared/lengths.cuh, shared/score.cuh.
  const i32* seqlens_q;  // LENGTHS == PADDED: (batch), rows of each sequence; null: all have seqlen_q
  const i32* seqlens_k;  // likewise keys
  const i32* cu_seqlens_q;  // LENGTHS == PACKED: (batch + 1), where the rows of each sequence begin and the last end
  const i32* cu_seqlens_k;  // likewise keys
  const float* alibi_slopes;  // ALIBI: (heads), or (batch, heads)
  const float* sink;  // SINK: (heads), natural log
  float* dsink;  // SINK: (heads), result
  i32 total_q, total_k;  // LENGTHS == PACKED: rows and keys of the arrays
  i32 shift;  // where row 0 stands among the keys: row i is at key i + shift; ALIBI. With LENGTHS, band_first and
  i32 shift_by_length;  // band_last count from there, and shift grows by this times (keys - rows) of a sequence
  i32 alibi_stride;  // ALIBI: elements from sequence to sequence
  // GROUPED: backward/common/workspace.cuh.
  i32 heads_per_group, whole_groups, groups_before, groups_converted;
  i32 strips_per_head;  // of a key/value head: rows of its query heads by 16, each head's up to a whole tile
  MaskParams mask;
};
