// The key tiles that a query block visits, where its results go, and its trace record.
#pragma once
#include "shared/params.cuh"
#include "shared/lengths.cuh"
#include "shared/irregular_mask.cuh"
#include "shared/mask.cuh"

// One query block of one head.
struct WorkItem {
  int q_block, head, batch;
};

// The mask of every head of dense sequences.
constexpr MaskKind MASK_KIND = MaskKind(MASK);
using HeadMask = Band<MASK_KIND>;
template <typename Params>
DEVICE HeadMask head_mask(const Params& p) { return {p.seqlen_q, p.seqlen_k, p.band_first, p.band_last}; }

// Later query blocks visit more key tiles. Irregular masks count as well: most of them lie within a causal band.
constexpr bool LATER_ROWS_SEE_MORE = MASK_KIND == MASK_CAUSAL || is_looked_up(MASK_KIND);

// The mask of one sequence. With LENGTHS the edges of the band are distances from the sequence's diagonal.
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
  if constexpr (is_looked_up(MASK_KIND)) {  // any tile may be visited
    [[maybe_unused]] const int total = (p.seqlen_k - 1) / BC + 1;
    return {total, 0, total, 0, 0};
  }
  return head_mask(p).tiles<BR, BC, SKIP_MASKED_TILES>(q_block);
}

// TRACE, irregular masks: how many tiles were visited, how many of them were clear, and the first of each kind.
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
