// The query tiles that a key block of the mma.sync kernels visits under an irregular mask.
#pragma once
#include "backward/common/schedule.cuh"

// The tiles are the same for each head of the query group.
struct QueryWalk {
  TileWalk<false> walk{0};
  int head = 0;  // of the query group

  DEVICE WalkedTile next(const BackwardParams& p, int k_block, int batch, int kv_head) {
    const int total = classified_query_tiles(p, k_block, batch);
    auto classify = [&](int tile) { return class_of_query_tile(p, k_block, batch, kv_head, tile); };
    WalkedTile found = walk.next(total, classify);
    if (!found.exists() && ++head < p.heads / p.kv_heads) {
      walk = TileWalk<false>(0);
      found = walk.next(total, classify);
    }
    return found;
  }
};
