// The lengths of the sequences of a call, and where their rows and keys lie in the arrays: the device side of
// cufa/problem/lengths.py.
//
// Only this file reads lengths. The host does not know them when it launches a kernel: values out of range are clamped to the
// arrays.
#pragma once
#include "shared/params.cuh"

// CACHED_...: the queries are padded or packed, and the keys in a cache (forward/cache.cuh).
enum LengthsKind { DENSE, PADDED, PACKED, CACHED_PADDED, CACHED_PACKED };
constexpr bool CACHED = LENGTHS >= CACHED_PADDED;
constexpr LengthsKind LENGTHS_KIND = LengthsKind(CACHED ? LENGTHS - CACHED_PADDED + PADDED : LENGTHS);

// A sequence of dense arrays: its sizes are parameters, and are read where they are needed.
template <typename Params>
struct DenseSequence {
  const Params& p;
  int sequence_index;

  DEVICE int batch() const { return sequence_index; }  // index in the arrays
  DEVICE int rows() const { return p.seqlen_q; }
  DEVICE int keys() const { return p.seqlen_k; }
  // Rows and keys of the results that are written: zeros in padding.
  DEVICE int stored_rows() const { return p.seqlen_q; }
  DEVICE int stored_keys() const { return p.seqlen_k; }
  // Its first row and key in packed arrays.
  DEVICE i64 first_row() const { return 0; }
  DEVICE i64 first_key() const { return 0; }
};

// A padded or packed sequence. In packed arrays, what follows the last sequence counts as one more sequence, of index p.batch,
// with no rows and no keys.
struct RaggedSequence {
  int sequence_index, rows_, keys_, stored_rows_, stored_keys_, first_row_, first_key_;

  DEVICE int batch() const { return LENGTHS_KIND == PACKED ? 0 : sequence_index; }
  DEVICE int rows() const { return rows_; }
  DEVICE int keys() const { return keys_; }
  DEVICE int stored_rows() const { return stored_rows_; }
  DEVICE int stored_keys() const { return stored_keys_; }
  DEVICE i64 first_row() const { return first_row_; }
  DEVICE i64 first_key() const { return first_key_; }
};

DEVICE int within(int n, int most) { return min(max(n, 0), most); }

template <typename Params>
DEVICE auto sequence_of(const Params& p, int sequence_index) {
  if constexpr (CACHED) {
    return cached_sequence(p, sequence_index);
  } else if constexpr (LENGTHS_KIND == PADDED) {
    const int rows = p.seqlens_q == nullptr ? p.seqlen_q : within(ld_global<i32>(p.seqlens_q + sequence_index), p.seqlen_q);
    const int keys = p.seqlens_k == nullptr ? p.seqlen_k : within(ld_global<i32>(p.seqlens_k + sequence_index), p.seqlen_k);
    return RaggedSequence{sequence_index, rows, keys, p.seqlen_q, p.seqlen_k, 0, 0};
  } else if constexpr (LENGTHS_KIND == PACKED) {
    const bool behind = sequence_index == p.batch;
    const int row = within(ld_global<i32>(p.cu_seqlens_q + sequence_index), p.total_q);
    const int key = within(ld_global<i32>(p.cu_seqlens_k + sequence_index), p.total_k);
    const int row_end = behind ? p.total_q : within(ld_global<i32>(p.cu_seqlens_q + sequence_index + 1), p.total_q);
    const int key_end = behind ? p.total_k : within(ld_global<i32>(p.cu_seqlens_k + sequence_index + 1), p.total_k);
    const int rows = max(row_end - row, 0), keys = max(key_end - key, 0);
    return RaggedSequence{sequence_index, behind ? 0 : rows, behind ? 0 : keys, rows, keys, row, key};
  } else {
    return DenseSequence<Params>{p, sequence_index};
  }
}

// Rows and keys of a sequence.
template <typename Params>
DEVICE int rows_of(const Params& p, int sequence_index) {
  if constexpr (LENGTHS_KIND == DENSE) return p.seqlen_q;
  return sequence_of(p, sequence_index).rows();
}
template <typename Params>
DEVICE int keys_of(const Params& p, int sequence_index) {
  if constexpr (LENGTHS_KIND == DENSE) return p.seqlen_k;
  return sequence_of(p, sequence_index).keys();
}

// The diagonal of a sequence: row i is at key i + diagonal_of(), for distances in masks and ALiBi.
template <typename Params, typename Sequence>
DEVICE i64 diagonal_of(const Params& p, const Sequence& sequence) {
  if constexpr (LENGTHS_KIND == DENSE) return p.shift;
  return p.shift + i64(p.shift_by_length) * (sequence.keys() - sequence.rows());
}

// Index of a head's first row in an array (batch, heads, seqlen_q), or (heads, total_q) if packed. `head` counts over the batch
// of the arrays.
template <typename Params, typename Sequence>
DEVICE i64 row_stats_index(const Params& p, const Sequence& sequence, i64 head) {
  if constexpr (LENGTHS_KIND == PACKED) return head * p.total_q + sequence.first_row();
  return head * p.seqlen_q;
}
