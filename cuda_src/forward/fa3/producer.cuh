// The producer if the tiles of a query block are a range: producer and consumers compute the range by themselves. (If tiles are
// listed: lister.cuh.) Lines are those of Algorithm 1 of the paper.
#pragma once
#include "forward/fa3/memory.cuh"
#include "forward/fa3/persistent_items.cuh"

using QueryRing = RingCursor<Q_STAGES>;  // its barriers: Q_full and Q_empty of SharedMemory

DEVICE int await_query_buffer(const SharedMemory& smem, const QueryRing& ring, int consumer) {
  const int buffer = ring.stage * CONSUMERS + consumer;
  mbarrier_wait(smem.Q_empty + 8 * buffer, ring.phase ^ 1);
  return buffer;
}

// 64 rows of Q from row `first_row` of the tile on: one box for each head that shares the tile.
DEVICE void load_packed_heads(u32 tile, u32 full, const TensorMap* Q_map, const WorkItem& work, int first_row) {
  constexpr int BOX_ROWS = HEAD_ROWS < GROUP_ROWS ? HEAD_ROWS : GROUP_ROWS;
  mbarrier_arrive_expect_tx(full, Q_TILE_BYTES);
  for (int a = 0; a < atoms(HEAD_DIM); ++a) {
    for (int row = 0; row < GROUP_ROWS; row += BOX_ROWS) {
      tma_load_4d(tile + (a * GROUP_ROWS + row) * ATOM_ROW_BYTES, Q_map, full, a * ATOM_COLUMNS,
                  work.q_block * HEAD_ROWS + query_of_row(first_row + row), work.head + (first_row + row) / HEAD_ROWS,
                  work.batch);
    }
  }
}

// Loads Q of an item, a tile for each consumer. `row` and `batch` are the first query's place in the arrays.
DEVICE void load_query_tiles(const SharedMemory& smem, const TensorMap* Q_map, QueryRing& ring, const WorkItem& work, int row,
                             int batch) {
  for (int w = 0; w < CONSUMERS; ++w) {
    const int buffer = await_query_buffer(smem, ring, w);
    const u32 tile = smem.Q + buffer * Q_TILE_BYTES, full = smem.Q_full + 8 * buffer;
    if constexpr (PACKED_HEADS == 1) {
      load_tile<GROUP_ROWS, HEAD_DIM>(tile, full, Q_map, row + w * GROUP_ROWS, work.head, batch);
    } else {
      load_packed_heads(tile, full, Q_map, work, w * GROUP_ROWS);
    }
  }
  ring.advance();
}

// After the last item: consumers wait for Q before they read that no item follows.
DEVICE void end_query_tiles(const SharedMemory& smem, const QueryRing& ring) {
  for (int w = 0; w < CONSUMERS; ++w) mbarrier_arrive(smem.Q_full + 8 * await_query_buffer(smem, ring, w));
}

// Alg. 1, l. 3-10: one thread asks for tiles in the order in which consumers need them.
struct Producer {
  const AttentionParams& p;
  const TensorMap *Q_map, *K_map, *V_map;
  const SharedMemory& smem;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  QueryRing Q_ring{};
  u32 round = 0;
  PhaseLog inside = PhaseLog(p.trace, true);

  DEVICE void run(PersistentItems& items) {
    for (u32 index; items.next(index);) {
      const WorkItem work = items.item(p, index);
      const TileRange tiles = tiles_of(p, work.q_block);
      if (tiles.empty()) continue;
      // Consumers read the descriptor after they have waited for the item's Q. It overwrites the descriptor of four items
      // ago: all consumers have given back Q of the last item but one, and so have stored the item before that.
      write_shared(smem.item(round++), Item{work, index});
      inside.item(index + gridDim.x * blockIdx.y);
      load_item(work, tiles);
    }
    write_shared(smem.item(round), Item{{NO_MORE_ITEMS, 0, 0}, 0});
    end_query_tiles(smem, Q_ring);
    inside.close();
  }

  // The first K before Q, whose buffer may be in use for longer; then K one tile ahead of V.
  DEVICE void load_item(const WorkItem& work, const TileRange& tiles) {
    const int kv_head = work.head / (p.heads / p.kv_heads);
    load<HEAD_DIM>(K_ring, smem.K, K_map, tiles.end - 1, kv_head, work.batch);
    load_query_tiles(smem, Q_map, Q_ring, work, work.q_block * Br, work.batch);
    for (int j = tiles.end - 1; j >= tiles.first; --j) {
      if (j > tiles.first) load<HEAD_DIM>(K_ring, smem.K, K_map, j - 1, kv_head, work.batch);
      load<V_DIM>(V_ring, smem.V, V_map, j, kv_head, work.batch);
    }
  }
  template <int COLUMNS>
  DEVICE void load(RingCursor<NUM_STAGES>& ring, u32 buffers, const TensorMap* map, int j, int kv_head, int batch) {
    ring.wait_empty(inside, j);
    load_tile<Bc, COLUMNS>(buffers + ring.stage * wgmma_tile_bytes(Bc, COLUMNS), ring.full_barrier(), map, j * Bc, kv_head,
                           batch);
    ring.advance();
  }
};
