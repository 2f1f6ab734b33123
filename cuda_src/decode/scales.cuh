// Shapes of k_scale and v_scale of an e4m3 cache: float32, contiguous. Appends write scales of OF_BLOCK and OF_TOKEN.
//
//                contiguous                                    PAGED
//   OF_HEAD      (kv_heads)                                    (kv_heads)
//   OF_BLOCK     (batch, kv_heads, ceil(capacity / SCALE_BLOCK))   (num_pages, kv_heads)
//   OF_TOKEN     (batch, kv_heads, capacity)                   (num_pages, kv_heads, page_size)
#pragma once
#include "decode/memory.cuh"
#include "decode/schedule.cuh"

enum ScaleOf { OF_HEAD, OF_BLOCK, OF_TOKEN };
static_assert(FP8_CACHE || !KEY_SCALES, "KEY_SCALES: 16-bit caches have no scales");
static_assert(!QUANTIZE_NEW || (KEY_SCALES && !APPEND), "QUANTIZE_NEW: decode_append appends, with KEY_SCALES");

// Index of the scale of slot `slot` in page (PAGED) or sequence `outer`.
DEVICE i64 key_scale_index(const DecodeParams& p, int outer, int kv_head, int slot) {
  const int slots = PAGED ? p.page_size : p.capacity;
  const i64 row = i64(outer) * p.kv_heads + kv_head;
  if constexpr (KEY_SCALES == OF_TOKEN) return row * slots + slot;
  return PAGED ? row : row * ((slots + SCALE_BLOCK - 1) / SCALE_BLOCK) + slot / SCALE_BLOCK;
}
