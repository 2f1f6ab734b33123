// Which block of which head a thread block takes, in kernels with one work item for each thread block.
#pragma once
#include "shared/packed_blocks.cuh"
#include "shared/schedule.cuh"

struct HeadBlock {
  u32 block, head;
};

// Thread block number -> block of a head, and head. Full masks and windows, whose blocks have nearly equal length: the blocks of
// a head run side by side and share the L2 cache. If later blocks are longer: long (late) blocks first, in head batches that fit
// in the L2 cache. The shortest 3/8 of all heads come last and without batches: a grid whose last batch began with its longest
// blocks would leave most SMs idle at the end (13-16% of the time with 5.3 batches on 132 SMs).
DEVICE HeadBlock ordered_block(u32 index, u32 num_blocks, u32 all_heads, i64 head_bytes) {
  constexpr i64 L2_SHARE = 24 << 20;  // bytes
  u32 block, head;
  if constexpr (LATER_ROWS_SEE_MORE) {
    const u32 short_blocks = u32(u64(num_blocks) * 3 / 8), long_blocks = num_blocks - short_blocks;
    if (index < long_blocks * all_heads) {
      const u32 fitting = u32(max(i64(1), min(i64(all_heads), L2_SHARE / head_bytes)));
      const u32 num_batches = (all_heads - 1) / fitting + 1, batch_heads = (all_heads - 1) / num_batches + 1;
      const u32 head_batch = index / (batch_heads * long_blocks), rest = index - head_batch * batch_heads * long_blocks;
      const u32 members = min(batch_heads, all_heads - head_batch * batch_heads);
      block = num_blocks - 1 - rest / members;
      head = head_batch * batch_heads + rest % members;
    } else {
      const u32 rest = index - long_blocks * all_heads;
      block = short_blocks - 1 - rest / all_heads;
      head = rest % all_heads;
    }
  } else {
    block = index % num_blocks;
    head = index / num_blocks;
  }
  return {block, head};
}

// SHARED: heads that share a tile (forward/splits.cuh). The work item names the first of them.
template <int BR, int SHARED = 1>
DEVICE WorkItem work_item(const AttentionParams& p, u32 index, int kv_bytes_per_row) {
  if constexpr (LENGTHS_KIND == PACKED) {
    const u32 num_blocks = num_packed_blocks<BR>(p.total_q, p.batch);
    const HeadBlock found = ordered_block(index, num_blocks, u32(p.heads), i64(p.seqlen_k) * kv_bytes_per_row);
    const PackedBlock block = packed_block<BR>(p.cu_seqlens_q, p.batch, p.total_q, found.block);
    return {block.block, int(found.head), block.sequence};
  }
  const u32 Tr = u32(p.seqlen_q - 1) / BR + 1, all_heads = u32(p.batch) * (u32(p.heads) / SHARED);
  const HeadBlock found = ordered_block(index, Tr, all_heads, i64(p.seqlen_k) * kv_bytes_per_row);
  const u32 heads = u32(p.heads) / SHARED;
  return {int(found.block), int(found.head % heads) * SHARED, int(found.head / heads)};
}
