// The launch before attention over a cache: new tokens are appended, each to the slot of its sequence's next key.
#pragma once
#include "forward/cache.cuh"
#include "shared/packed_blocks.cuh"

constexpr int APPEND_TOKENS = 8;  // tokens of a thread block: one for each warp
static_assert(ALIGNMENT == 16 && HEAD_DIM <= 256, "a lane copies 16 bytes of a row");

// Grid: (blocks of tokens, kv_heads).
DEVICE void append_tokens(const CacheParams& p) {
  if constexpr (CACHED) {
    int sequence, block;
    if constexpr (LENGTHS_KIND == PACKED) {
      const PackedBlock found = packed_block<APPEND_TOKENS>(p.cu_seqlens_q, p.batch, p.total_q, blockIdx.x);
      sequence = found.sequence;
      block = found.block;
    } else {
      const int blocks = (p.seqlen_q - 1) / APPEND_TOKENS + 1;
      sequence = blockIdx.x / blocks;
      block = blockIdx.x % blocks;
    }
    if (sequence == p.batch) return;  // after the last packed sequence
    const RaggedSequence own = cached_sequence(p, sequence);
    const int token = block * APPEND_TOKENS + threadIdx.x / 32, key = keys_before(p, sequence) + token;
    if (token >= own.rows() || key >= p.seqlen_k) return;
    const PlaceInCache to = place_in_cache(p, sequence, key);
    const int lane = threadIdx.x % 32, head = blockIdx.y;
    if (page_is_wild(p, to.page) || lane >= HEAD_DIM / 8) return;
    auto copy = [&](const void* from, const Strides& step, const void* cache, const Strides& stride) {
      const i64 row = own.batch() * step.batch + head * step.head + (own.first_row() + token) * step.seq + lane * 8;
      const i64 slot = to.page * stride.batch + head * stride.head + to.slot * stride.seq + lane * 8;
      const vec4 x = ld_global<vec4>(static_cast<const char*>(from) + 2 * row);
      st_global(static_cast<char*>(const_cast<void*>(cache)) + 2 * slot, x);
    };
    copy(p.k_new, p.k_new_stride, p.k, p.k_stride);
    copy(p.v_new, p.v_new_stride, p.v, p.v_stride);
  }
}
