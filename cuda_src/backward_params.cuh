// The one argument of every backward kernel. cufa/core/params.py reads the structure from here: a test compares every
// offset.
#pragma once
#include "params.cuh"

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
  void* workspace;    // 16-byte aligned: see tiles/backward_workspace.cuh
  TraceRecord* trace;  // one per key block and key/value head; read only when TRACE is on
  Strides dout_stride, q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride;
  i32 batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;       // softmax scale: what dq and dk are multiplied by in the end
  float scale_log2;  // softmax scale * log2(e), positive
  i32 band_first, band_last;  // row i sees keys i + band_first ... i + band_last; read where MASK has that edge
  float softcap;  // read when SOFTCAP: softmax scale / cap; scale_log2 is then cap * log2(e) (tiles/score.cuh)
};
