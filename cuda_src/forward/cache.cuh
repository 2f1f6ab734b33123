// Keys in a cache, contiguous or in pages: the lengths of sequences.
#pragma once
#include "shared/cache_params.cuh"
#include "shared/lengths.cuh"
#include "shared/pages.cuh"

// The parameters of a build with a cache.
DEVICE const CacheParams& cache_of(const AttentionParams& p) { return static_cast<const CacheParams&>(p); }

// Keys of a sequence before new tokens are appended.
DEVICE int keys_before(const CacheParams& p, int sequence) {
  return p.cache_seqlens == nullptr ? p.seqlen_k : within(ld_global<i32>(p.cache_seqlens + sequence), p.seqlen_k);
}

// sequence_of() of a CACHED build. If new tokens are appended, each query has one.
DEVICE RaggedSequence cached_sequence(const AttentionParams& params, int index) {
  const CacheParams& p = cache_of(params);
  int rows, first_row = 0;
  if constexpr (LENGTHS_KIND == PACKED) {
    first_row = within(ld_global<i32>(p.cu_seqlens_q + index), p.total_q);
    if (index == p.batch) return {index, 0, 0, p.total_q - first_row, 0, first_row, 0};
    rows = max(within(ld_global<i32>(p.cu_seqlens_q + index + 1), p.total_q) - first_row, 0);
  } else {
    rows = p.seqlens_q == nullptr ? p.seqlen_q : within(ld_global<i32>(p.seqlens_q + index), p.seqlen_q);
  }
  const int keys = keys_before(p, index);
  return {index, rows, p.k_new == nullptr ? keys : min(keys + rows, p.seqlen_k), LENGTHS_KIND == PACKED ? rows : p.seqlen_q, 0,
          first_row, 0};
}
