// The mask of a sequence, and the trace record of a work item.
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
constexpr bool LATER_ROWS_SEE_MORE = MASK_KIND == MASK_CAUSAL || is_irregular(MASK_KIND);

// The mask of one sequence. With LENGTHS the edges of the band are distances from the sequence's diagonal.
template <typename Params, typename Sequence>
DEVICE HeadMask head_mask(const Params& p, const Sequence& sequence) {
  if constexpr (LENGTHS_KIND == DENSE) return head_mask(p);
  const i64 shift = diagonal_of(p, sequence), least = -sequence.rows(), most = sequence.keys();
  auto edge = [&](int distance) { return int(min(max(shift + distance, least), most)); };
  return {sequence.rows(), sequence.keys(), edge(p.band_first), edge(p.band_last)};
}

// The irregular mask of one head.
template <typename Params>
DEVICE auto irregular_mask(const Params& p, int batch, int kv_head, int member) {
  return IrregularMask<MASK_KIND, Params>(p, head_mask(p, sequence_of(p, batch)), batch, kv_head, member);
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
