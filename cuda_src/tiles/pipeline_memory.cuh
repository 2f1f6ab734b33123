// The shared memory that a producer and its consumers share (kernels/fa3_forward.cu): tiles, their barriers, items.
#pragma once
#include "tiles/consumer.cuh"
#include "tiles/pipeline.cuh"

// Shared memory: Q of every consumer (Q_STAGES deep: the next item's Q arrives while this one's is in use), the K and
// V rings, then the barriers.
constexpr int K_OFFSET = Q_STAGES * CONSUMERS * Q_BYTES, V_OFFSET = K_OFFSET + NUM_STAGES * KV_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + NUM_STAGES * KV_BYTES;
constexpr int NUM_BARRIERS = 2 * (Q_STAGES * CONSUMERS + 2 * NUM_STAGES);
constexpr int ITEM_OFFSET = (BARRIER_OFFSET + 8 * NUM_BARRIERS + 15) / 16 * 16;
static_assert(ITEM_OFFSET + 16 * ITEM_RECORDS == SMEM_BYTES, "the registry computes the same layout");

// What lies where. Barriers: Q full, Q empty (by stage, then consumer), K full, K empty, V full, V empty.
struct SharedMemory {
  u32 Q, K, V, Q_full, Q_empty, K_full, V_full, items;

  DEVICE explicit SharedMemory(u32 start)
      : Q(start), K(start + K_OFFSET), V(start + V_OFFSET), Q_full(start + BARRIER_OFFSET),
        Q_empty(Q_full + 8 * Q_STAGES * CONSUMERS), K_full(Q_empty + 8 * Q_STAGES * CONSUMERS),
        V_full(K_full + 16 * NUM_STAGES), items(start + ITEM_OFFSET) {}

  DEVICE Ring<NUM_STAGES> K_ring() const { return {K_full, K_full + 8 * NUM_STAGES}; }
  DEVICE Ring<NUM_STAGES> V_ring() const { return {V_full, V_full + 8 * NUM_STAGES}; }
  DEVICE u32 item(u32 round) const { return items + 16 * (round % ITEM_RECORDS); }

  // A buffer is full when the thread that asked TMA for it has arrived and its bytes have; empty when every warp that reads
  // it has arrived.
  DEVICE void init_barriers() const {
    for (int i = 0; i < Q_STAGES * CONSUMERS; ++i) {
      mbarrier_init(Q_full + 8 * i, 1);
      mbarrier_init(Q_empty + 8 * i, 4);  // the warps of one consumer
    }
    for (int i = 0; i < NUM_STAGES; ++i) {
      mbarrier_init(K_ring().full + 8 * i, 1);
      mbarrier_init(V_ring().full + 8 * i, 1);
      mbarrier_init(K_ring().empty + 8 * i, 4 * CONSUMERS);
      mbarrier_init(V_ring().empty + 8 * i, 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
};
