// The shared memory that a producer and its consumers share (forward/fa3/kernel.cu): tiles, their barriers, items.
#pragma once
#include "forward/fa3/consumer.cuh"
#include "wgmma/pipeline.cuh"

// Shared memory: Q of every consumer, the K and V rings, a full and an empty barrier for each of their buffers, items; where
// tiles are listed, which one is in each buffer of K, the list, and a barrier for what a loader has to finish.
static_assert(Q_BYTES == Q_STAGES * CONSUMERS * Q_TILE_BYTES, "the next item's Q arrives while this one's is in use");
static_assert(K_BYTES == NUM_STAGES * KV_TILE_BYTES && V_BYTES == K_BYTES, "rings of tiles");
static_assert(Q_FULL_BYTES == 8 * Q_STAGES * CONSUMERS && Q_EMPTY_BYTES == Q_FULL_BYTES, "a barrier a tile, by stage");
static_assert(K_FULL_BYTES == 8 * NUM_STAGES && K_EMPTY_BYTES == K_FULL_BYTES, "likewise");
static_assert(V_FULL_BYTES == 8 * NUM_STAGES && V_EMPTY_BYTES == V_FULL_BYTES, "likewise");
static_assert(ITEMS_BYTES == 48 * (4 + LIST_STAGES) && ITEMS_BYTES >= ITEM_BYTES * ITEM_RECORDS, "the most that there are");
static_assert(TILES_BYTES == 8 * NUM_STAGES, "a tile each");
static_assert(LIST_BYTES == 16 * LIST_STAGES && LIST_FULL_BYTES == 8 * LIST_STAGES, "entries and their barriers");
static_assert(LIST_EMPTY_BYTES == LIST_FULL_BYTES && TAIL_FULL_BYTES == 8, "likewise");

// Addresses. Of Q there is a tile and a barrier of each kind by stage, then consumer.
struct SharedMemory {
  u32 Q, K, V, Q_full, Q_empty, K_full, K_empty, V_full, V_empty, items, tiles, list, list_full, list_empty, tail_full;

  DEVICE explicit SharedMemory(u32 start)
      : Q(start + Q_OFFSET), K(start + K_OFFSET), V(start + V_OFFSET), Q_full(start + Q_FULL_OFFSET),
        Q_empty(start + Q_EMPTY_OFFSET), K_full(start + K_FULL_OFFSET), K_empty(start + K_EMPTY_OFFSET),
        V_full(start + V_FULL_OFFSET), V_empty(start + V_EMPTY_OFFSET), items(start + ITEMS_OFFSET),
        tiles(start + TILES_OFFSET), list(start + LIST_OFFSET), list_full(start + LIST_FULL_OFFSET),
        list_empty(start + LIST_EMPTY_OFFSET), tail_full(start + TAIL_FULL_OFFSET) {}

  DEVICE RingCursor<NUM_STAGES> K_ring() const { return {K_full, K_empty}; }
  DEVICE RingCursor<NUM_STAGES> V_ring() const { return {V_full, V_empty}; }
  DEVICE RingCursor<LIST_STAGES> list_ring() const { return {list_full, list_empty}; }
  DEVICE u32 item(u32 round) const { return items + ITEM_BYTES * (round % ITEM_RECORDS); }
  DEVICE u32 tile(int stage) const { return tiles + 8 * stage; }  // in this buffer of K

  // A buffer is full when the thread that asked TMA for it has arrived and its bytes have; empty when every warp that reads
  // it has arrived.
  DEVICE void init_barriers() const {
    for (int i = 0; i < Q_STAGES * CONSUMERS; ++i) {
      mbarrier_init(Q_full + 8 * i, 1);
      mbarrier_init(Q_empty + 8 * i, 4);  // the warps of one consumer
    }
    for (int i = 0; i < NUM_STAGES; ++i) {
      mbarrier_init(K_full + 8 * i, 1);
      mbarrier_init(V_full + 8 * i, 1);
      mbarrier_init(K_empty + 8 * i, 4 * CONSUMERS);
      mbarrier_init(V_empty + 8 * i, 4 * CONSUMERS);
    }
    if constexpr (LISTED) {
      for (int i = 0; i < LIST_STAGES; ++i) {
        mbarrier_init(list_full + 8 * i, 1);
        mbarrier_init(list_empty + 8 * i, 2);  // K's loader and V's
      }
      mbarrier_init(tail_full, 1);
    }
    mbarrier_init_fence();
  }
};
