// The one argument of every forward kernel. cufa/core/params.py reads the structures from here: a test compares every
// offset.
#pragma once
#include "primitives/primitives.cuh"

// Written once per work item (query block x head) by a build with TRACE on. The tiles visited lie side by side, and so do
// the clear ones among them: the class of every tile follows.
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
  float softcap;  // read when SOFTCAP: softmax scale / cap; scale_log2 is then cap * log2(e) (tiles/score.cuh)
};
