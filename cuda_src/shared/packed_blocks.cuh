// Blocks of rows or keys of packed sequences.
#pragma once
#include "shared/lengths.cuh"

// Packed rows (or keys) in blocks of BLOCK: the first block of sequence b is begin / BLOCK + b. Whatever the lengths, blocks of
// earlier sequences come before it. A sequence's blocks depend on its begin only; the number of all blocks, on the total length.
template <int BLOCK>
DEVICE u32 first_packed_block(int begin, int sequence) { return u32(begin) / BLOCK + u32(sequence); }
template <int BLOCK>
DEVICE u32 num_packed_blocks(int total, int batch) { return u32(total) / BLOCK + u32(batch) + 1; }

// The sequence of a packed row: the last that begins at or before it. Rows after the last sequence: `batch`.
DEVICE int sequence_of_row(const i32* cu_seqlens, int batch, int row) {
  int low = 0, high = batch;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (ld_global<i32>(cu_seqlens + middle) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

struct PackedBlock {
  int sequence, block;  // the block may lie past the end of its sequence
};

// The last sequence whose first block is at most this one.
template <int BLOCK>
DEVICE PackedBlock packed_block(const i32* cu_seqlens, int batch, int total, u32 index) {
  auto first = [&](int b) { return first_packed_block<BLOCK>(within(ld_global<i32>(cu_seqlens + b), total), b); };
  int low = 0, high = batch;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first(middle) <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, max(int(index - first(low)), 0)};
}
