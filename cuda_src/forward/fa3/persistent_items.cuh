// Which work items a persistent thread block takes.
#pragma once
#include "forward/splits.cuh"
#include "shared/packed_blocks.cuh"

// The work items of a persistent thread block. With G blocks, block b takes items b, 2G-1-b, 2G+b, ...: no block gets the
// longest item of every round. This order needs no counter in memory, and is the same in every run. If later rows see more
// keys, heads go in head batches, each from its longest query block to its shortest. The planner chooses the size of a head
// batch (cufa/schedule/order.py): few heads share the L2 cache better; some sizes leave fewer blocks idle at the end. Under
// an irregular mask the last query blocks need not be the longest: p.block_order lists them if the host knows.
struct PersistentItems {
  u32 Tr, total, round = 0;

  DEVICE static u32 heads(const AttentionParams& p) { return u32(p.heads) / PACKED_HEADS; }
  // Packed: Tr counts the query blocks of all sequences.
  DEVICE static u32 batch(const AttentionParams& p) { return LENGTHS_KIND == PACKED ? 1 : u32(p.batch); }
  DEVICE static u32 query_blocks(const AttentionParams& p) {
    return LENGTHS_KIND == PACKED ? num_packed_blocks<HEAD_ROWS>(p.total_q, p.batch) : u32(p.seqlen_q - 1) / HEAD_ROWS + 1;
  }

  DEVICE explicit PersistentItems(const AttentionParams& p)
      : Tr(query_blocks(p)), total(Tr * batch(p) * heads(p)) {}

  // False when this block has done its share.
  DEVICE bool next(u32& index) {
    const u32 place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    index = round++ * gridDim.x + place;
    return index < total;
  }

  // If the lengths of items are unknown: a block takes the next item when it is ready. Called by all lanes of a warp. The counter
  // counts `total` requests: one for each item but a block's first, and one in vain by each block that had an item. (Relaxed: an
  // acquire would empty the L1 cache that masks are read through.)
  DEVICE bool take(const AttentionParams& p, u32& index) {
    index = blockIdx.x;
    if (round++ > 0) {
      if constexpr (SPLIT_KEYS) return false;
      u32 taken = 0;
      if (lane_id() == 0) {
        taken = atomic_add(p.counters, 1);
        if (taken == total - 1) atomic_add(p.counters, 0u - total);  // for the next launch
      }
      index = gridDim.x + shfl(taken, 0);
    }
    return index < total;
  }

  // Slow divisions: once per item.
  DEVICE WorkItem item(const AttentionParams& p, u32 index) const {
    u32 q_block, head;
    if constexpr (LATER_ROWS_SEE_MORE) {
      const u32 batch_heads = u32(p.heads_per_head_batch), all_heads = batch(p) * heads(p);
      const u32 head_batch = index / (batch_heads * Tr), rest = index - head_batch * batch_heads * Tr;
      const u32 members = min(batch_heads, all_heads - head_batch * batch_heads);
      q_block = Tr - 1 - rest / members;
      if constexpr (is_irregular(MASK_KIND)) {
        if (p.block_order != nullptr) q_block = u32(ld_global<i32>(p.block_order + rest / members));
      }
      head = head_batch * batch_heads + rest % members;
    } else {
      q_block = index % Tr;
      head = index / Tr;
    }
    if constexpr (LENGTHS_KIND == PACKED) {
      const PackedBlock block = packed_block<HEAD_ROWS>(p.cu_seqlens_q, p.batch, p.total_q, q_block);
      return {block.block, int(head), block.sequence};
    }
    return {int(q_block), int(head % heads(p)) * PACKED_HEADS, int(head / heads(p))};
  }
};
