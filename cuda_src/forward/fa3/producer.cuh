// The producer if the tiles of a query block are a range: producer and consumers compute the range by themselves. (If tiles are
// listed: lister.cuh.) Lines are those of Algorithm 1 of the paper.
#pragma once
#include "shared/params.cuh"
#include "primitives/mbarrier.cuh"
#include "forward/fa3/consumer.cuh"
#include "shared/phases.cuh"
#include "wgmma/pipeline.cuh"
#include "forward/fa3/memory.cuh"
#include "forward/fa3/persistent_items.cuh"

using Items = PersistentItems<HEAD_ROWS, PACKED_HEADS>;

// Alg. 1, l. 3-10: one thread asks for tiles in the order in which consumers need them.
struct Producer {
  const AttentionParams& p;
  const TensorMap *Q_map, *K_map, *V_map;
  const SharedMemory& smem;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  RingCursor<Q_STAGES> Q_ring{};
  u32 round = 0;
  PhaseLog inside = PhaseLog(p.trace, true);

  DEVICE void run(Items& items) {
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
    for (int w = 0; w < CONSUMERS; ++w) {
      wait_for_query_buffer(w);
      mbarrier_arrive(smem.Q_full + 8 * query_buffer(w));
    }
    inside.close();
  }

  // The first K before Q, whose buffer may be in use for longer; then K one tile ahead of V, in the order that consumers need.
  DEVICE void load_item(const WorkItem& work, const TileRange& tiles) {
    const int kv_head = work.head / (p.heads / p.kv_heads);
    load(K_ring, smem.K, K_map, tiles.end - 1, kv_head, work.batch);
    for (int w = 0; w < CONSUMERS; ++w) {
      wait_for_query_buffer(w);
      const u32 tile = smem.Q + query_buffer(w) * Q_TILE_BYTES, full = smem.Q_full + 8 * query_buffer(w);
      if constexpr (PACKED_HEADS == 1) {
        load_tile<GROUP_ROWS, HEAD_DIM>(tile, full, Q_map, work.q_block * Br + w * GROUP_ROWS, work.head, work.batch);
      } else {
        load_packed_heads(tile, full, Q_map, work, w * GROUP_ROWS);
      }
    }
    Q_ring.advance();
    for (int j = tiles.end - 1; j >= tiles.first; --j) {
      if (j > tiles.first) load(K_ring, smem.K, K_map, j - 1, kv_head, work.batch);
      load(V_ring, smem.V, V_map, j, kv_head, work.batch);
    }
  }

  DEVICE int query_buffer(int consumer) const { return Q_ring.stage * CONSUMERS + consumer; }
  DEVICE void wait_for_query_buffer(int consumer) const {
    mbarrier_wait(smem.Q_empty + 8 * query_buffer(consumer), Q_ring.phase ^ 1);
  }
  DEVICE void load(RingCursor<NUM_STAGES>& ring, u32 buffers, const TensorMap* map, int j, int kv_head, int batch) {
    ring.wait_empty(inside, j);
    load_tile<Bc, HEAD_DIM>(buffers + ring.stage * KV_TILE_BYTES, ring.full_barrier(), map, j * Bc, kv_head, batch);
    ring.advance();
  }
};
