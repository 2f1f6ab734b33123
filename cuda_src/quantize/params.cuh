// The argument of the quantiser's kernels: members of 8 bytes, which cufa/kernels/quantize.py lists in this order.
#pragma once
#include "primitives/primitives.cuh"

struct QuantizeParams {
  const char* x;       // (batch, heads, seqlen, HEAD_DIM)
  char* out;           // e4m3, the same axes; TRANSPOSE: (batch, heads, HEAD_DIM, positions)
  float* scale;
  u32* maxima;         // for each block and each of its scales: bits of the largest magnitude, and PUBLISHED; zeros at first
  double* sums;        // SMOOTH: (sequences, heads, chunks, HEAD_DIM), sums of rows
  float* mean;         // SMOOTH: (sequences, heads, HEAD_DIM)
  const i32* lengths;  // PADDED: (sequences), tokens of each; PACKED: (sequences + 1), where each begins, and the end
  u64 signs[4];        // ROTATE: a bit for each column, set where the column is negated: byte c / 8, from its highest bit on
  i64 x_batch, x_head, x_row, out_batch, out_head, out_row;  // bytes from one to the next
  i64 sequences, heads, seqlen;  // seqlen: tokens of a batch entry
  i64 blocks, lead;  // token blocks of a head, over all sequences; how many blocks the maxima are ahead of the cast
};
