// The key tiles that a query block of the forward visits, and where its results go.
#pragma once
#include "shared/schedule.cuh"

template <int BR, int BC>
DEVICE TileRange visited_tiles(const HeadMask& mask, int q_block) {
  if (LENGTHS_KIND != DENSE && (mask.keys == 0 || q_block * BR >= mask.rows)) return {};
  if constexpr (is_irregular(MASK_KIND)) {  // any tile may be visited
    [[maybe_unused]] const int total = (mask.keys - 1) / BC + 1;
    return {total, 0, total, 0, 0};
  }
  return mask.tiles<BR, BC, SKIP_MASKED_TILES>(q_block);
}

template <int BR, int BC>
DEVICE TileRange visited_tiles(const AttentionParams& p, int q_block) {
  return visited_tiles<BR, BC>(head_mask(p), q_block);
}

// Where a row of 16-bit results goes, and its LSE.
DEVICE char* output_row(const AttentionParams& p, const WorkItem& item, int row) {
  return static_cast<char*>(p.o) +
         2 * (item.batch * p.o_stride.batch + item.head * p.o_stride.head + row * p.o_stride.seq);
}
DEVICE float* lse_row(const AttentionParams& p, const WorkItem& item, int row) {
  return p.lse + (i64(item.batch) * p.heads + item.head) * p.seqlen_q + row;
}
