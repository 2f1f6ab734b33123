// The position of a consumer warp, and its waits and products with their stamps for an inside trace (shared/phases.cuh).
#pragma once
#include "backward/fa3_common/items.cuh"
#include "shared/phases.cuh"

struct TracedConsumer {
  const KernelParams& p;
  const int warp, lane;  // in the warpgroup, in the warp
  KeyBlock block{p, 0};
  QueryTile tile{};
  PhaseLog log = PhaseLog(p.trace, warp == 0 && lane == 0);

  DEVICE TracedConsumer(const KernelParams& p, int thread) : p(p), warp(thread / 32 % 4), lane(thread % 32) {}

  DEVICE u32 stamp_of(QueryTile tile) const {
    if constexpr (!TRACE_INSIDE) return 0;
    return query_tile_stamp(tile.head, block.q_tile(tile));
  }
  DEVICE void enter(Phase phase) { log.enter(phase, stamp_of(tile)); }
  DEVICE void enter_item() { log.enter(ITEM, TRACE_INSIDE ? block.index() : 0); }

  // Waits until the n-th buffer of a ring is full (WAIT_DATA; WAIT_TURN: other consumers fill it), or empty.
  template <typename Ring>
  DEVICE void wait_full(const Ring& ring, u32 n, Phase phase = WAIT_DATA) {
    enter(phase);
    ring.wait_full(n);
  }
  template <typename Ring>
  DEVICE void wait_empty(const Ring& ring, u32 n) {
    enter(WAIT_SPACE);
    ring.wait_empty(n);
    enter(SOFTMAX);
  }
  // Call it before wgmma reads registers that other instructions have written.
  DEVICE void begin_products() {
    enter(ISSUE);
    wgmma_fence();
  }
  // Commits the products since the last commit as one wgmma group: in flight until await() has waited for it.
  DEVICE void commit(Phase products, u32 stamp) {
    wgmma_commit();
    log.enter(products | IN_FLIGHT, stamp);
  }
  // Waits until at most YOUNGER wgmma groups are pending. `products` labels the group that this completes.
  template <int YOUNGER>
  DEVICE void await(Phase products) {
    enter(WAIT_PRODUCTS);
    wgmma_wait<YOUNGER>();
    log.enter(products | LANDED);
  }
};
