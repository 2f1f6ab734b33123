// The shared memory of backward/fa3/kernel.cu: tiles of keys and values, rings of queries, of gradients of O and of dS, the
// two numbers of each row, and the barriers by which a producer and its consumers hand them to one another.
#pragma once
#include "backward/fa3_common/gradients.cuh"
#include "backward/fa3_common/loader.cuh"
#include "backward/fa3_common/sums.cuh"

// dQ of a tile is shared out by rows, or by columns: those of one consumer lie in one atom of K.
constexpr bool DQ_BY_ROWS = Br == 64 * CONSUMERS;
constexpr int DQ_TILES = DQ_BY_ROWS                ? D_TILES
                         : HEAD_DIM <= ATOM_COLUMNS ? (D_TILES + CONSUMERS - 1) / CONSUMERS
                                                    : ATOM_COLUMNS / 8;
// Those of the last consumer, for which fewer may be left. DQ_UNEVEN: it then asks for those alone, in code of its own; where blocks
// run on, which takes more code, it asks for as many as the other.
constexpr int DQ_TILES_LEFT = DQ_BY_ROWS ? DQ_TILES : D_TILES - (CONSUMERS - 1) * DQ_TILES;
constexpr bool DQ_UNEVEN = !RUNS_ON && DQ_TILES_LEFT != DQ_TILES && DQ_TILES_LEFT > 0;
constexpr int DQ_WARP_BYTES = DQ_TILES * ACCUMULATOR * 4;  // of one warp's 16 rows

static_assert(KEY_GROUPS == CONSUMERS, "64 keys a consumer");
static_assert(DQ_BY_ROWS || Br == 64, "a consumer computes 64 rows of dQ");
static_assert(DQ_TILES_LEFT >= 0 && DQ_TILES_LEFT <= DQ_TILES, "every column of dQ has a consumer");
static_assert(!LOOKED_UP || LIST_BYTES > 0, "tiles are listed");
static_assert(V_BYTES == CONSUMERS * KEY_TILE_BYTES && K_BYTES == K_STAGES * V_BYTES, "a tile a consumer");
static_assert(K_STAGES == 1 || (RUNS_ON && !BULK_ADD), "of two items; a warp that says what it has added has done so itself");
static_assert(Q_BYTES == NUM_STAGES * QUERY_TILE_BYTES && DO_BYTES == DO_STAGES * QUERY_TILE_BYTES, "rings of tiles");
static_assert(DS_BYTES == DS_STAGES * CONSUMERS * DS_PART_BYTES, "likewise");
static_assert(LSE_BYTES == NUM_STAGES * NUMBERS_BYTES && DELTA_BYTES == DO_STAGES * NUMBERS_BYTES, "numbers of their tiles");
static_assert(DQ_BYTES == (BULK_ADD ? 4 * CONSUMERS * DQ_WARP_BYTES : 0), "what a warp adds");
static_assert(Q_FULL_BYTES == 8 * NUM_STAGES && Q_EMPTY_BYTES == Q_FULL_BYTES, "a barrier a tile");
static_assert(DO_FULL_BYTES == 8 * DO_STAGES && DO_EMPTY_BYTES == DO_FULL_BYTES, "likewise");
static_assert(DS_FULL_BYTES == 8 * DS_STAGES && DS_EMPTY_BYTES == DS_FULL_BYTES, "likewise");
static_assert(DQ_FULL_BYTES == 8 && DQ_EMPTY_BYTES == 8, "one buffer");

// Addresses.
struct BackwardMemory {
  u32 K, V, Q, dO, dS, dQ, lse, delta, barriers;
  ItemBarriers items;

  DEVICE explicit BackwardMemory(u32 start)
      : K(start + K_OFFSET), V(start + V_OFFSET), Q(start + Q_OFFSET), dO(start + DO_OFFSET), dS(start + DS_OFFSET),
        dQ(start + DQ_OFFSET), lse(start + LSE_OFFSET), delta(start + DELTA_OFFSET), barriers(start), items(start) {}

  DEVICE Ring<NUM_STAGES> Q_turns() const { return {barriers + Q_FULL_OFFSET, barriers + Q_EMPTY_OFFSET}; }
  DEVICE Ring<DO_STAGES> dO_turns() const { return {barriers + DO_FULL_OFFSET, barriers + DO_EMPTY_OFFSET}; }
  DEVICE Ring<DS_STAGES> dS_turns() const { return {barriers + DS_FULL_OFFSET, barriers + DS_EMPTY_OFFSET}; }
  DEVICE DqHandover dQ_handover() const { return {barriers + DQ_FULL_OFFSET, barriers + DQ_EMPTY_OFFSET}; }
  DEVICE u32 K_of(u32 keys) const { return K + items.keys.stage(keys) * V_BYTES; }

  // What a warp of consumers adds to a tile of the workspace, and where it is staged.
  DEVICE static float* dq_of_warp(const BackwardParams& p, u32 tile, int consumer, int warp) {
    return dq_place(p, tile, (DQ_BY_ROWS ? consumer * 4 : 0) + warp, DQ_BY_ROWS ? 0 : consumer * DQ_TILES);
  }
  DEVICE static int dq_tiles(int consumer) { return consumer == CONSUMERS - 1 ? DQ_TILES_LEFT : DQ_TILES; }  // that exist
  DEVICE u32 staged(int consumer, int warp) const { return dQ + (consumer * 4 + warp) * DQ_WARP_BYTES; }
  // By one thread: that of all warps.
  DEVICE void add_staged(const BackwardParams& p, u32 tile) const {
    if constexpr (DQ_BY_ROWS) {
      bulk_add_f32(dq_of_warp(p, tile, 0, 0), dQ, TILE_DQ_FLOATS * 4);
    } else {
#pragma unroll 1
      for (int w = 0; w < 4 * CONSUMERS; ++w) {
        const int existing = dq_tiles(w / 4);
        if (existing <= 0) break;
        bulk_add_f32(dq_of_warp(p, tile, w / 4, w % 4), staged(w / 4, w % 4), existing * (ACCUMULATOR * 4));
      }
    }
  }

  // Full when the thread that asked the copy engine has arrived and its bytes have; dS when all warps have stored their part.
  // Empty when every warp that reads it has arrived.
  DEVICE void init_barriers() const {
    items.init();
    Q_turns().init(1, 4 * CONSUMERS);
    dO_turns().init(1, 4 * CONSUMERS);
    dS_turns().init(4 * CONSUMERS, 4 * CONSUMERS);
    if constexpr (DETERMINISTIC) init_dq_handover(dQ_handover());
    mbarrier_init_fence();
  }
};
