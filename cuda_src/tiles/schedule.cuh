// Which query blocks a thread block takes, and which tiles these visit. And the trace that proves it.
#pragma once
#include "params.cuh"
#include "tiles/mask.cuh"

// One query block of one head.
struct WorkItem {
  int q_block, head, batch;
};

// The mask of every head, and the key tiles that one query block visits.
constexpr MaskKind MASK_KIND = MaskKind(MASK);
using HeadMask = Band<MASK_KIND>;
template <typename Params>
DEVICE HeadMask head_mask(const Params& p) { return {p.seqlen_q, p.seqlen_k, p.band_first, p.band_last}; }

template <int BR, int BC>
DEVICE TileRange visited_tiles(const AttentionParams& p, int q_block) {
  return head_mask(p).tiles<BR, BC, SKIP_MASKED_TILES>(q_block);
}

// Thread block number -> block of a head, and head. Full attention, and windows, whose blocks are of nearly one length: the
// blocks of a head run side by side and share what they read in the L2 cache. Where later blocks are longer (MASK_CAUSAL):
// long (late) blocks come first, in groups of heads that fit in the L2 cache together. The shortest 3/8 of all heads
// come last and without groups, as filling: a grid whose last group began with its longest blocks would leave most SMs idle
// meanwhile (13-16% of the time with 5.3 groups on 132 SMs).
struct HeadBlock {
  u32 block, head;
};

DEVICE HeadBlock ordered_block(u32 index, u32 num_blocks, u32 all_heads, i64 head_bytes) {
  constexpr i64 L2_SHARE = 24 << 20;  // bytes
  u32 block, head;
  if constexpr (MASK_KIND == MASK_CAUSAL) {
    const u32 short_blocks = u32(u64(num_blocks) * 3 / 8), long_blocks = num_blocks - short_blocks;
    if (index < long_blocks * all_heads) {
      const u32 fitting = u32(max(i64(1), min(i64(all_heads), L2_SHARE / head_bytes)));
      const u32 num_groups = (all_heads - 1) / fitting + 1, group_heads = (all_heads - 1) / num_groups + 1;
      const u32 group = index / (group_heads * long_blocks), rest = index - group * group_heads * long_blocks;
      const u32 members = min(group_heads, all_heads - group * group_heads);
      block = num_blocks - 1 - rest / members;
      head = group * group_heads + rest % members;
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

template <int BR>
DEVICE WorkItem work_item(const AttentionParams& p, u32 index, int kv_bytes_per_row) {
  const u32 Tr = u32(p.seqlen_q - 1) / BR + 1, all_heads = u32(p.batch) * u32(p.heads);
  const HeadBlock found = ordered_block(index, Tr, all_heads, i64(p.seqlen_k) * kv_bytes_per_row);
  return {int(found.block), int(found.head % u32(p.heads)), int(found.head / u32(p.heads))};
}

// The items of a persistent thread block, which takes one after another. Blocks take turns forwards and backwards (b,
// 2G-1-b, 2G+b, ...), so that none gets the longest item of every round: no counter in memory, and repeats are alike.
// Where later rows see more, heads go in groups from their longest query block to their shortest. How many make a group is
// the planner's choice (cufa/core/order.py): few share the L2 cache better, some numbers leave fewer blocks idle at the end.
template <int BR>
struct PersistentItems {
  u32 Tr, total, round = 0;

  DEVICE explicit PersistentItems(const AttentionParams& p)
      : Tr(u32(p.seqlen_q - 1) / BR + 1), total(Tr * u32(p.batch) * u32(p.heads)) {}

  // False when this block has done its share.
  DEVICE bool next(u32& index) {
    const u32 place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    index = round++ * gridDim.x + place;
    return index < total;
  }

  // Divisions, slow ones: once per item.
  DEVICE WorkItem item(const AttentionParams& p, u32 index) const {
    u32 q_block, head;
    if constexpr (MASK_KIND == MASK_CAUSAL) {
      const u32 group_heads = u32(p.heads_per_group), all_heads = u32(p.batch) * u32(p.heads);
      const u32 group = index / (group_heads * Tr), rest = index - group * group_heads * Tr;
      const u32 members = min(group_heads, all_heads - group * group_heads);
      q_block = Tr - 1 - rest / members;
      head = group * group_heads + rest % members;
    } else {
      q_block = index % Tr;
      head = index / Tr;
    }
    return {int(q_block), int(head % u32(p.heads)), int(head / u32(p.heads))};
  }
};

// Where a row of 16-bit results goes, and its LSE.
DEVICE char* output_row(const AttentionParams& p, const WorkItem& item, int row) {
  return static_cast<char*>(p.o) +
         2 * (item.batch * p.o_stride.batch + item.head * p.o_stride.head + row * p.o_stride.seq);
}
DEVICE float* lse_row(const AttentionParams& p, const WorkItem& item, int row) {
  return p.lse + (i64(item.batch) * p.heads + item.head) * p.seqlen_q + row;
}

// One record per work item, written by one thread. Compiled only when TRACE is on.
template <typename Params>
DEVICE void write_trace(const Params& p, u32 index, const WorkItem& item, const TileRange& tiles, u64 start_ns) {
  TraceRecord record;
  record.start_ns = start_ns;
  record.end_ns = global_timer();
  record.sm = sm_id();
  record.q_block = u32(item.q_block);
  record.head = u32(item.head);
  record.batch = u32(item.batch);
  record.first_tile = u32(tiles.first);
  record.tiles_visited = u32(tiles.end - tiles.first);
  record.tiles_skipped = u32(tiles.total) - record.tiles_visited;
  record.first_clear = u32(tiles.clear_first);
  record.tiles_clear = u32(tiles.clear_end - tiles.clear_first);
  record.thread_block = blockIdx.x;
  p.trace[index] = record;
}
