// Forward kernels with one work item for each thread block.
#pragma once
#include "shared/schedule.cuh"

// The item is parked in 16 bytes of shared memory, beside a value of the kernel's own: registers are scarce.
DEVICE void park_item(u32 smem, const WorkItem& item, u32 other) {
  st_shared_vec4(smem, {u32(item.q_block), u32(item.head), u32(item.batch), other});
}
DEVICE WorkItem parked_item(u32 smem) {
  const vec4 x = ld_shared_vec4(smem);
  return {int(x.x), int(x.y), int(x.z)};
}

// Class of a key tile under an irregular mask. Without SKIP_MASKED_TILES every tile is visited.
template <typename Params>
DEVICE TileClass class_of_key_tile(const Params& p, const WorkItem& item, int tile) {
  const int top = item.q_block * BLOCK_Q, left = tile * BLOCK_KV, right = left + BLOCK_KV, group = p.heads / p.kv_heads;
  const auto mask = irregular_mask(p, item.batch, item.head / group, item.head % group);
  const int rows = rows_of(p, item.batch), keys = keys_of(p, item.batch);
  const TileClass is = mask.classify(top, min(top + BLOCK_Q, rows), left, min(right, keys), tile);
  return {is.some || !SKIP_MASKED_TILES, is.some && is.every && right <= keys};
}
