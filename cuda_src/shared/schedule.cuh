// Which query blocks a thread block takes, and which tiles these visit. And the trace that proves it.
#pragma once
#include "shared/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/irregular_mask.cuh"
#include "shared/mask.cuh"

// One query block of one head.
struct WorkItem {
  int q_block, head, batch;
};

// The mask of every head, and the key tiles that one query block visits.
constexpr MaskKind MASK_KIND = MaskKind(MASK);
using HeadMask = Band<MASK_KIND>;
template <typename Params>
DEVICE HeadMask head_mask(const Params& p) { return {p.seqlen_q, p.seqlen_k, p.band_first, p.band_last}; }

// Query blocks differ in length, and as far as is known the last are the longest. (Nothing is known of sets and columns but
// that most of them lie within a causal band.)
constexpr bool LATER_ROWS_SEE_MORE = MASK_KIND == MASK_CAUSAL || is_looked_up(MASK_KIND);

// That of one sequence: with LENGTHS, edges are given as distances from its diagonal.
template <typename Params, typename Sequence>
DEVICE HeadMask head_mask(const Params& p, const Sequence& sequence) {
  if constexpr (LENGTHS_KIND == DENSE) return head_mask(p);
  const i64 shift = diagonal_of(p, sequence), least = -sequence.rows(), most = sequence.keys();
  auto edge = [&](int distance) { return int(min(max(shift + distance, least), most)); };
  return {sequence.rows(), sequence.keys(), edge(p.band_first), edge(p.band_last)};
}

template <int BR, int BC>
DEVICE TileRange visited_tiles(const HeadMask& mask, int q_block) {
  if (LENGTHS_KIND != DENSE && (mask.keys == 0 || q_block * BR >= mask.rows)) return {};
  return mask.tiles<BR, BC, SKIP_MASKED_TILES>(q_block);
}

template <int BR, int BC>
DEVICE TileRange visited_tiles(const AttentionParams& p, int q_block) {
  if constexpr (is_looked_up(MASK_KIND)) {  // any of them, until they are
    [[maybe_unused]] const int total = (p.seqlen_k - 1) / BC + 1;
    return {total, 0, total, 0, 0};
  }
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
  if constexpr (LATER_ROWS_SEE_MORE) {
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

// An item may be of SHARED heads side by side (forward/splits.cuh): it is named by the first.
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

// What a trace build says of tiles that are looked up: how many were visited and how many of these were clear, and the first
// of each. They need not lie side by side.
struct TileTally {
  TileRange seen{0, 0, 0, 0, 0};

  DEVICE void count(int tile, bool masked) {
    seen.first = seen.end == 0 ? tile : min(seen.first, tile);
    ++seen.end;
    if (masked) return;
    seen.clear_first = seen.clear_end == 0 ? tile : min(seen.clear_first, tile);
    ++seen.clear_end;
  }
  DEVICE TileRange range(int total) const {
    return {total, seen.first, seen.first + seen.end, seen.clear_first, seen.clear_first + seen.clear_end};
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
  record.thread_block = blockIdx.x + gridDim.x * blockIdx.y;
  p.trace[index + gridDim.x * blockIdx.y] = record;
}
