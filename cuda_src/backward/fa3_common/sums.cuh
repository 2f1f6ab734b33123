// How dQ is added up in the backward kernels of Hopper: every key block adds to the tiles of the workspace that it visits, either
// each warp from its registers, or (BULK_ADD) the copy engine from where warps have staged it in shared memory. A tile is
// known by its number in the workspace.
//
// DETERMINISTIC: key blocks add to a tile from right to left. No consumer waits for a turn at a counter: threads of the
// producer do, so that products go on meanwhile. With BULK_ADD they add what consumers have staged (DqAdder); else they
// tell them when they may (TurnKeeper). A turn is passed on as soon as its addition is done.
#pragma once
#include "backward/fa3_common/block.cuh"

// What consumers hand to the thread that adds, or it to them: see DqAdder and TurnKeeper.
using DqHandover = Ring<1>;
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

// How many key blocks have added to a tile. PAIRED: half of its columns are one block's of each pair, with a counter of their own.
DEVICE u32* turn_counter(const KeyBlock& block, QueryTile tile, u32 rank) {
  return BackwardWorkspace::turn(block.p, block.place(tile)) + rank;
}
// How many add before this one does.
DEVICE u32 turn_of(const KeyBlock& block, QueryTile tile) {
  return key_blocks_before<Br, Bc>(block.mask(), tile.q_tile, block.k_block());
}
// By one thread: until it is the block's turn.
DEVICE void await_turn(const KeyBlock& block, QueryTile tile, u32 rank = 0) {
  const u32 turn = turn_of(block, tile);
  while (ld_acquire_gpu(turn_counter(block, tile, rank)) != turn) {
  }
}
DEVICE void pass_turn_on(const KeyBlock& block, QueryTile tile, u32 rank = 0) {
  red_release_gpu_add(turn_counter(block, tile, rank), 1);
}

// DETERMINISTIC and BULK_ADD: adds what the warps of consumers have staged, when it is this block's turn. Full when all of them
// have, empty when the copy engine has read it. To learn of a turn, to add and to pass it on take longer than a tile of head
// dim 128, so ADDERS threads take the tiles by turns.
template <typename Memory>
struct DqAdder {
  const BackwardParams& p;
  const u32 start;  // of the shared memory
  const u32 adder;

  DEVICE void run() const {
    visit_items(p, start, [&](const TileVisit& at) {
      if (at.n % ADDERS != adder) return;
      const Memory smem(opaque(start));
      const DqHandover turns = smem.dQ_handover();
      await_turn(at.block, at.tile);
      turns.wait_empty(at.n);  // what the other adder gives back, or its phase would be taken for this one's
      turns.wait_full(at.n);
      smem.add_staged(p, at.block.place(at.tile));
      bulk_commit();
      bulk_wait_read();
      turns.release(at.n, 0);
      bulk_wait();  // added, and not only read
      pass_turn_on(at.block, at.tile);
    });
  }
};

// DETERMINISTIC without BULK_ADD: tells consumers when it is this block's turn to add to a tile (full), and the next block
// when all of them have (empty). Whose turn the next tile is it asks while they add, and tells them before it passes this one
// on: both take long.
template <typename Memory>
struct TurnKeeper {
  const BackwardParams& p;
  const u32 start;  // of the shared memory
  const u32 rank;   // of the block in its pair

  DEVICE void run() const {
    bool told = false;
    visit_items(p, start, [&](const TileVisit& at) {
      const DqHandover turns = Memory(opaque(start)).dQ_handover();
      if (!told) {
        await_turn(at.block, at.tile, rank);
        mbarrier_arrive(turns.full_barrier(at.n));
      }
      told = !at.last && is_turn(at.block, at.block.next(at.tile));
      turns.wait_empty(at.n + 1);
      if (told) mbarrier_arrive(turns.full_barrier(at.n + 1));
      pass_turn_on(at.block, at.tile, rank);
    });
  }
  DEVICE bool is_turn(const KeyBlock& block, QueryTile tile) const {
    return ld_acquire_gpu(turn_counter(block, tile, rank)) == turn_of(block, tile);
  }
};
