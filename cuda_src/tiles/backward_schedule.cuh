// Which key block a thread block of a backward kernel takes, which query tiles it visits, and in which order key blocks add to
// a tile of dQ where that order is fixed.
#pragma once
#include "primitives/semaphore.cuh"
#include "tiles/backward_workspace.cuh"
#include "tiles/schedule.cuh"

// One key block of one key/value head.
struct KeyItem {
  int k_block, kv_head, batch;
};

// Early key blocks are seen by more rows (MASK_CAUSAL), so the order is that of the forward's query blocks turned around.
// DETERMINISTIC: from right to left within a head, because a block waits for those at its right (DqTurns).
template <int BC>
DEVICE KeyItem key_item(const BackwardParams& p, u32 index, int head_bytes_per_row) {
  const u32 Tc = u32(p.seqlen_k - 1) / BC + 1, all_heads = u32(p.batch) * u32(p.kv_heads);
  HeadBlock found;
  if constexpr (DETERMINISTIC) {
    found = {Tc - 1 - index % Tc, index / Tc};
  } else {
    found = ordered_block(index, Tc, all_heads, i64(p.seqlen_q) * (p.heads / p.kv_heads) * head_bytes_per_row);
    if constexpr (MASK_KIND == MASK_CAUSAL) found.block = Tc - 1 - found.block;
  }
  return {int(found.block), int(found.head % u32(p.kv_heads)), int(found.head / u32(p.kv_heads))};
}

// A query tile of one query head, and its successor among those that a key block visits: tiles of a head from first to last
// (where later rows see more, from the diagonal on), then those of the next head of the group.
struct QueryTile {
  int head, q_tile;

  DEVICE QueryTile next(const TileRange& tiles) const {
    return q_tile + 1 < tiles.end ? QueryTile{head, q_tile + 1} : QueryTile{head + 1, tiles.first};
  }
  DEVICE QueryTile previous(const TileRange& tiles) const {
    return q_tile > tiles.first ? QueryTile{head, q_tile - 1} : QueryTile{head - 1, tiles.end - 1};
  }
};

// DETERMINISTIC: key blocks add to a tile of dQ from right to left. Blocks are launched in that order, and a causal block
// begins at its diagonal, where it is the first: then nobody waits long.
template <int BR, int BC>
struct DqTurns {
  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  int k_block;
  i64 first_head;  // of the batch

  // How many key blocks have added to a tile. Without acquire: what those before have added is never read here, and
  // additions do not overtake a load on which they depend.
  DEVICE u32 count(QueryTile tile) const { return ld_relaxed_gpu(counter(tile)); }

  // By one thread, before a barrier of the block that comes before the additions; `found` is what count() said before.
  DEVICE void await(QueryTile tile, u32 found) const {
    const u32 turn = u32(visitors(tile).end - 1 - k_block);
    while (found != turn) found = count(tile);
  }

  // By one thread, after a barrier of the block that comes after the additions.
  DEVICE void pass_on(QueryTile tile) const { red_release_gpu_add(counter(tile), 1); }

 private:
  DEVICE TileRange visitors(QueryTile tile) const { return head_mask(p).template tiles<BR, BC, true>(tile.q_tile); }
  DEVICE u32* counter(QueryTile tile) const {
    return workspace.turns + (first_head + tile.head) * ((p.seqlen_q - 1) / BR + 1) + tile.q_tile;
  }
};
