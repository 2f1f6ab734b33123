// How K, V, Q and dO come to a thread block of the backward kernels of Hopper: two threads of the producer, or two of its warps, ask
// the copy engine for tiles.
#pragma once
#include "backward/fa3_common/block.cuh"

// By the producer: 64 of the keys, of K or V.
DEVICE void load_keys(const KeyBlock& block, int group, u32 tile, u32 barrier, const TensorMap* map) {
  load_tile<GROUP_KEYS, HEAD_DIM>(tile, barrier, map, block.key_in_arrays() + block.first_key() + group * GROUP_KEYS,
                                  block.kv_head(), block.batch_in_arrays());
}

// By the producer: Q or dO of a tile, with L or D of its rows.
DEVICE void load_queries(const KeyBlock& block, QueryTile tile, u32 queries, u32 numbers, u32 barrier, const TensorMap* map,
                         const float* source) {
  mbarrier_arrive_expect_tx(barrier, QUERY_TILE_BYTES + NUMBERS_BYTES);
  const int batch = block.batch_in_arrays(), row = block.row_in_arrays() + block.q_tile(tile) * Br;
  for (int a = 0; a < atoms(HEAD_DIM); ++a) {
    tma_load_4d(queries + a * Br * ATOM_ROW_BYTES, map, barrier, a * ATOM_COLUMNS, row, tile.head, batch);
  }
  bulk_load(numbers, source, NUMBERS_BYTES, barrier);
}

// Two threads of the producer ask the copy engine for tiles, as consumers need them: one for Q with L, and K (FIRST), one for V,
// and dO with D. Memory is what has Q_turns(), dO_turns(), items, and addresses of the tiles.
//
// RAGGED: they are warps. The copy engine brings whole tiles: behind the last row or key of a sequence there are those of another,
// or what nobody has written. Their P and dS are 0, but 0 times what is no number is none, so these rows become zeros
// before consumers are told of the tile.
template <typename Memory, bool FIRST>
struct Loader {
  const BackwardParams& p;
  const TensorMap *queries, *keys;
  const u32 start;  // of the shared memory
  mutable u32 tail_parity = 0;
  INSIDE(mutable PhaseLog inside = PhaseLog(p.trace, leads());)

  DEVICE static bool leads() { return !RAGGED || lane_id() == 0; }

  DEVICE void run() const {
    INSIDE(inside.enter(WAIT_ITEM);)
    grid_await_previous();
    visit_items<FIRST>(p, start, [&](const TileVisit& at) {
      if (at.first) await_prepared(at.block);
      INSIDE(if (at.first) inside.item(at.block.index());)
      load_tile(at);
      if (at.first) load_keys(at);
      INSIDE(inside.enter(WAIT_ITEM);)
    });
    INSIDE(inside.close();)
  }

  DEVICE void load_keys(const TileVisit& at) const {
    const Memory smem(opaque(start));
    INSIDE(inside.enter(WAIT_SPACE, NO_TILE);)
    if (leads()) FIRST ? smem.items.keys.wait_empty(at.item) : smem.items.values.wait_empty(at.item);
    INSIDE(inside.enter(COPY, NO_TILE);)
    const u32 full = FIRST ? smem.items.keys.full_barrier(at.item) : smem.items.values.full_barrier(at.item);
    const u32 first_tile = FIRST ? smem.K + smem.items.keys.stage(at.item) * (KEY_GROUPS * KEY_TILE_BYTES) : smem.V;
    for (int w = 0; w < KEY_GROUPS; ++w) {
      const u32 tile = first_tile + w * KEY_TILE_BYTES;
      bring<GROUP_KEYS>(smem.items, tile, full, RAGGED ? at.block.keys() - at.block.first_key() - w * GROUP_KEYS : GROUP_KEYS,
                        [&](u32 barrier) { ::load_keys(at.block, w, tile, barrier, keys); });
    }
    if constexpr (PAIRED && FIRST) {
      const int first = Memory::other_first_key(at.block);
      bring<GROUP_KEYS, Memory::OTHER_COLUMNS>(smem.items, smem.other_K, full,
                                               RAGGED ? at.block.keys() - first : GROUP_KEYS,
                                               [&](u32 barrier) { smem.load_other_keys(at.block, first, barrier, keys); });
    }
  }

  DEVICE void load_tile(const TileVisit& at) const {
    const Memory smem(opaque(start));
    const float* const numbers = at.block.workspace(at.tile) + TILE_DQ_FLOATS;
    INSIDE(const u32 number = query_tile_number(at.tile.head, at.block.q_tile(at.tile)); inside.enter(WAIT_SPACE, number);)
    auto bring_queries = [&](const auto& turns, u32 ring, u32 ring_of_numbers, const float* source) {
      if (leads()) turns.wait_empty(at.n);
      INSIDE(inside.enter(COPY, number);)
      const u32 tile = ring + turns.stage(at.n) * QUERY_TILE_BYTES;
      bring<Br>(smem.items, tile, turns.full_barrier(at.n), RAGGED ? at.block.rows() - at.block.q_tile(at.tile) * Br : Br,
                [&](u32 barrier) {
                  load_queries(at.block, at.tile, tile, ring_of_numbers + turns.stage(at.n) * NUMBERS_BYTES, barrier, queries,
                               source);
                });
    };
    if constexpr (FIRST) {
      bring_queries(smem.Q_turns(), smem.Q, smem.lse, numbers);
    } else {
      bring_queries(smem.dO_turns(), smem.dO, smem.delta, numbers + Br);
    }
  }

  // A tile of ROWS, of which so many exist, by copy(barrier).
  template <int ROWS, int COLUMNS = HEAD_DIM, typename Copy>
  DEVICE void bring(const ItemBarriers& items, u32 tile, u32 full, [[maybe_unused]] int existing, const Copy& copy) const {
    if constexpr (!RAGGED) {
      copy(full);
    } else {
      const u32 tail_full = items.tails + (FIRST ? 0 : 8);
      const bool has_tail = existing < ROWS;
      if (leads()) copy(has_tail ? tail_full : full);
      warp_sync();  // nobody is ahead of who asks
      if (!has_tail) return;
      mbarrier_wait(tail_full, tail_parity);
      tail_parity ^= 1;
      clear_rows<ROWS, COLUMNS>(tile, max(existing, 0), lane_id());
      async_proxy_fence();
      warp_sync();  // all lanes have written their zeros
      if (leads()) mbarrier_arrive(full);
    }
  }
};
