// How dQ is added up in the backward kernels of Hopper: every key block adds to the tiles of the workspace that it visits, either
// each warp from its registers, or (BULK_ADD) the copy engine from where warps have staged it in shared memory. A tile is
// known by its number in the workspace.
//
// DETERMINISTIC: key blocks add to a tile from right to left. No consumer waits for a turn at a counter: one thread of the
// producer does, so that products go on meanwhile. With BULK_ADD it adds what consumers have staged (DqAdder); else it
// tells them when they may (TurnKeeper). A turn is passed on as soon as its addition is done.
#pragma once
#include "tiles/backward_block.cuh"

// What consumers hand to the thread that adds, or it to them: see DqAdder and TurnKeeper.
using DqHandover = Turns<DQ_PARTS>;
DEVICE void init_dq_handover(const DqHandover& turns) {
  turns.init(BULK_ADD ? 4 * CONSUMERS : 1, BULK_ADD ? 1 : 4 * CONSUMERS);
}

// 16 rows of a tile, `strip` of its strips, from accumulator `first` on.
DEVICE float* dq_place(const BackwardParams& p, u32 tile, int strip, int first) {
  return BackwardWorkspace::tile(p, tile) + (strip * D_TILES + first) * ACCUMULATOR;
}

// From registers. Of TILES accumulators those that exist.
template <int TILES>
DEVICE void add_dq(float* target, const float (&d)[4 * TILES], int existing, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    if (t < existing) red_add_f32x4(target + t * ACCUMULATOR + lane * 4, d[4 * t], d[4 * t + 1], d[4 * t + 2], d[4 * t + 3]);
  }
}

// By a warp, for the copy engine, which has read what was there before.
template <int TILES>
DEVICE void stage_dq(u32 staged, const float (&d)[4 * TILES], int lane) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    st_shared_vec4(staged + t * (ACCUMULATOR * 4) + lane * 16, {float_as_u32(d[4 * t]), float_as_u32(d[4 * t + 1]),
                                                                float_as_u32(d[4 * t + 2]), float_as_u32(d[4 * t + 3])});
  }
  async_proxy_fence();
  warp_sync();  // all of it is there
}

// The turns of part `part`, as one thread knows them.
struct TurnWatch {
  const int part;
  u32 ahead = NOT_ASKED;  // how many key blocks had added to the tile that comes next, when that was asked

  static constexpr u32 NOT_ASKED = ~0u;
  DEVICE u32* counter(const KeyBlock& block, QueryTile tile) const {
    return BackwardWorkspace::turn(block.p, block.place(tile)) + part;
  }
  // Until all key blocks to the right have added to the tile.
  DEVICE void await(const TileVisit& at) {
    const u32 turn = key_blocks_before<Br, Bc>(at.block.mask(), at.tile.q_tile, at.block.k_block());
    while (ahead != turn) ahead = ld_acquire_gpu(counter(at.block, at.tile));
  }
  // An answer takes as long as an addition, so it is asked for while one is on its way.
  DEVICE void look_ahead(const TileVisit& at) {
    ahead = at.last ? NOT_ASKED : ld_acquire_gpu(counter(at.block, at.block.next(at.tile)));
  }
  DEVICE void pass_on(const TileVisit& at) const { red_release_gpu_add(counter(at.block, at.tile), 1); }
};

// DETERMINISTIC and BULK_ADD: adds what the warps of consumers have staged, when it is this block's turn. Full when all of them
// have, empty when the copy engine has read it.
template <typename Memory>
struct DqAdder {
  const BackwardParams& p;
  const u32 start;  // of the shared memory

  DEVICE void run() const {
    TurnWatch watch{0};
    visit_items(p, start, [&](const TileVisit& at) {
      const Memory smem(opaque(start));
      const DqHandover turns = smem.dQ_handover();
      watch.await(at);
      turns.wait_full(at.n);
      smem.add_staged(p, at.block.place(at.tile));
      bulk_commit();
      bulk_wait_read();
      turns.release(at.n, 0);
      watch.look_ahead(at);
      bulk_wait();  // added, and not only read
      watch.pass_on(at);
    });
  }
};

// DETERMINISTIC without BULK_ADD: tells consumers when it is this block's turn to add a part of a tile (full), and the next block
// when all of them have (empty). Each part of a tile has a keeper: with one for both, consumers waited in every tile while it
// passed the first part on and learned whose turn the second was.
template <typename Memory>
struct TurnKeeper {
  const BackwardParams& p;
  const u32 start;  // of the shared memory
  const int part;

  DEVICE void run() const {
    TurnWatch watch{part};
    visit_items(p, start, [&](const TileVisit& at) {
      const DqHandover turns = Memory(opaque(start)).dQ_handover();
      const u32 turn = at.n * DQ_PARTS + part;
      watch.await(at);
      mbarrier_arrive(turns.full_barrier(turn));
      watch.look_ahead(at);
      turns.wait_empty(turn + DQ_PARTS);
      watch.pass_on(at);
    });
  }
};
