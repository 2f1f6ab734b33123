// The loads of K, V, Q and dO in Hopper's backward kernels: two threads of the producer start the copy engine. One loads K, and
// Q with L (LOADS_Q); the other loads V, and dO with -D.
//
// RAGGED: the loaders are warps. The copy engine brings whole tiles, and the rows past the end of a sequence belong to another
// sequence or were never written. Their P and dS are 0, but 0 x NaN is NaN: the loader zeroes these rows before it hands the tile
// to consumers.
#pragma once
#include "backward/fa3_common/items.cuh"
#include "shared/phases.cuh"

// Memory has Q_ring, dO_ring, rings, addresses of the tiles and, PAIRED, load_other_keys().
template <typename Memory, bool LOADS_Q>
struct Loader {
  const KernelParams& p;
  const TensorMap *queries, *keys;
  const u32 start;  // of the shared memory
  static constexpr int COLUMNS = LOADS_Q ? HEAD_DIM : V_DIM;
  static constexpr int KEY_TILE_BYTES = wgmma_tile_bytes(WARPGROUP_KEYS, COLUMNS);  // of K or V
  static constexpr int QUERY_TILE_BYTES = wgmma_tile_bytes(Br, COLUMNS);            // of Q or dO
  mutable u32 tail_parity = 0;
  mutable PhaseLog log = PhaseLog(p.trace, leads());

  DEVICE static bool leads() { return !RAGGED || lane_id() == 0; }

  DEVICE void run() const {
    log.enter(WAIT_ITEM);
    grid_await_previous();
    visit_items<LOADS_Q>(p, start, [&](const TileVisit& at) {
      if (at.first) await_prepared(at.block);
      if (TRACE_INSIDE && at.first) log.enter(ITEM, at.block.index());
      load_tile(at);
      if (at.first) load_keys(at);
      log.enter(WAIT_ITEM);
    });
    log.close();
  }

  // Waits until consumers have released the n-th buffer of a ring. `stamp` is for the trace.
  template <typename Ring>
  DEVICE void await_space(const Ring& ring, u32 n, u32 stamp) const {
    log.enter(WAIT_SPACE, stamp);
    if (leads()) ring.wait_empty(n);
    log.enter(COPY, stamp);
  }

  DEVICE void load_keys(const TileVisit& at) const {
    const Memory smem(opaque(start));
    if constexpr (LOADS_Q) {
      await_space(smem.rings.K, at.kv, NO_TILE);
    } else {
      await_space(smem.rings.V, at.kv, NO_TILE);
    }
    const u32 full = LOADS_Q ? smem.rings.K.full_barrier(at.kv) : smem.rings.V.full_barrier(at.kv);
    const u32 first_tile = LOADS_Q ? smem.K + smem.rings.K.stage(at.kv) * (KEY_TILES * KEY_TILE_BYTES) : smem.V;
    for (int w = 0; w < KEY_TILES; ++w) {
      const u32 tile = first_tile + w * KEY_TILE_BYTES;
      bring<WARPGROUP_KEYS>(smem.rings, tile, full,
                            RAGGED ? at.block.keys() - at.block.first_key() - w * WARPGROUP_KEYS : WARPGROUP_KEYS,
                            [&](u32 barrier) {
                              const int key = at.block.key_in_arrays() + at.block.first_key() + w * WARPGROUP_KEYS;
                              ::load_tile<WARPGROUP_KEYS, COLUMNS>(tile, barrier, keys, key, at.block.kv_head(),
                                                                    at.block.batch_in_arrays());
                            });
    }
    if constexpr (PAIRED && LOADS_Q) {
      const int first = Memory::other_first_key(at.block);
      bring<WARPGROUP_KEYS, OTHER_COLUMNS>(smem.rings, smem.other_K, full, RAGGED ? at.block.keys() - first : WARPGROUP_KEYS,
                                               [&](u32 barrier) { smem.load_other_keys(at.block, first, barrier, keys); });
    }
  }

  DEVICE void load_tile(const TileVisit& at) const {
    const Memory smem(opaque(start));
    const float* const stats = BackwardWorkspace::tile(p, at.block.workspace_tile(at.tile)) + TILE_DQ_FLOATS;
    if constexpr (LOADS_Q) {
      load_queries(smem, at, smem.Q_ring, smem.Q, smem.lse, stats);
    } else {
      load_queries(smem, at, smem.dO_ring, smem.dO, smem.neg_delta, stats + Br);
    }
  }
  // Q or dO of a tile, with L or -D of its rows.
  template <typename Ring>
  DEVICE void load_queries(const Memory& smem, const TileVisit& at, const Ring& ring, u32 tiles, u32 stats,
                           const float* source) const {
    await_space(ring, at.n, TRACE_INSIDE ? query_tile_stamp(at.tile.head, at.block.q_tile(at.tile)) : 0);
    const u32 tile = tiles + ring.stage(at.n) * QUERY_TILE_BYTES;
    bring<Br>(smem.rings, tile, ring.full_barrier(at.n), RAGGED ? at.block.rows() - at.block.q_tile(at.tile) * Br : Br,
              [&](u32 barrier) {
                const u32 stats_of_tile = stats + ring.stage(at.n) * TILE_STATS_BYTES;
                mbarrier_arrive_expect_tx(barrier, QUERY_TILE_BYTES + TILE_STATS_BYTES);
                const int batch = at.block.batch_in_arrays(), row = at.block.row_in_arrays() + at.block.q_tile(at.tile) * Br;
                for (int a = 0; a < atoms(COLUMNS); ++a) {
                  tma_load_4d(tile + a * Br * ATOM_ROW_BYTES, queries, barrier, a * ATOM_COLUMNS, row, at.tile.head, batch);
                }
                bulk_load(stats_of_tile, source, TILE_STATS_BYTES, barrier);
              });
  }

  // Brings a tile of ROWS rows by copy(barrier). `existing` rows belong to the sequence; the others are zeroed.
  template <int ROWS, int CLEARED = COLUMNS, typename Copy>
  DEVICE void bring(const ItemRings& rings, u32 tile, u32 full, [[maybe_unused]] int existing, const Copy& copy) const {
    if constexpr (!RAGGED) {
      copy(full);
    } else {
      const u32 tail_full = rings.tails + (LOADS_Q ? 0 : 8);
      const bool has_tail = existing < ROWS;
      if (leads()) copy(has_tail ? tail_full : full);
      warp_sync();  // the copy has been started before any lane waits for it
      if (!has_tail) return;
      mbarrier_wait(tail_full, tail_parity);
      tail_parity ^= 1;
      clear_rows<ROWS, CLEARED>(tile, max(existing, 0), lane_id());
      async_proxy_fence();
      warp_sync();  // all lanes have written their zeros
      if (leads()) mbarrier_arrive(full);
    }
  }
};
