// The shared memory of kernels/fa3_backward.cu: tiles of keys and values, rings of queries, of gradients of O and of dS, the
// two numbers of each row, and the barriers by which a producer and its consumers hand them to one another.
#pragma once
#include "tiles/backward_schedule.cuh"
#include "tiles/pipeline.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int GROUP_KEYS = 64;                // keys of one consumer warpgroup
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;  // warpgroup 0 is the producer
constexpr int KEY_TILE_BYTES = wgmma_tile_bytes(GROUP_KEYS, HEAD_DIM);  // K or V of one consumer
constexpr int QUERY_TILE_BYTES = wgmma_tile_bytes(Br, HEAD_DIM);        // Q or dO
constexpr int NUMBERS_BYTES = Br * 4;                                   // L or D
constexpr int DS_PART_BYTES = Br * ATOM_ROW_BYTES;                      // dS of one consumer's keys: a row per query

// dQ of a tile is shared out by rows, or by columns: those of one consumer lie in one atom of K.
constexpr bool DQ_BY_ROWS = Br == 64 * CONSUMERS;
constexpr int DQ_TILES = DQ_BY_ROWS ? D_TILES : HEAD_DIM <= ATOM_COLUMNS ? (D_TILES + CONSUMERS - 1) / CONSUMERS : ATOM_COLUMNS / 8;
constexpr int DQ_WARP_BYTES = DQ_TILES * ACCUMULATOR * 4;  // of one warp's 16 rows

static_assert(Bc == CONSUMERS * GROUP_KEYS, "64 keys a consumer");
static_assert(DQ_BY_ROWS || Br == 64, "a consumer computes 64 rows of dQ");
static_assert(DQ_BY_ROWS || DQ_TILES * CONSUMERS >= D_TILES, "every column of dQ has a consumer");
static_assert(K_BYTES == CONSUMERS * KEY_TILE_BYTES && V_BYTES == K_BYTES, "a tile a consumer");
static_assert(Q_BYTES == NUM_STAGES * QUERY_TILE_BYTES && DO_BYTES == DO_STAGES * QUERY_TILE_BYTES, "rings of tiles");
static_assert(DS_BYTES == DS_STAGES * CONSUMERS * DS_PART_BYTES, "likewise");
static_assert(LSE_BYTES == NUM_STAGES * NUMBERS_BYTES && DELTA_BYTES == DO_STAGES * NUMBERS_BYTES, "numbers of their tiles");
static_assert(DQ_BYTES == (BULK_ADD ? 4 * CONSUMERS * DQ_WARP_BYTES : 0), "what a warp adds");
static_assert(KV_FULL_BYTES == 16, "two barriers");
static_assert(Q_FULL_BYTES == 8 * NUM_STAGES && Q_EMPTY_BYTES == Q_FULL_BYTES, "a barrier a tile");
static_assert(DO_FULL_BYTES == 8 * DO_STAGES && DO_EMPTY_BYTES == DO_FULL_BYTES, "likewise");
static_assert(DS_FULL_BYTES == 8 * DS_STAGES && DS_EMPTY_BYTES == DS_FULL_BYTES, "likewise");

// A ring of buffers with a full and an empty barrier each, of which turn n takes buffer n % STAGES: where a thread is follows
// from n, and takes no registers.
template <int STAGES>
struct Turns {
  u32 full, empty;  // first barrier of each kind

  DEVICE static int stage(int n) { return n % STAGES; }
  DEVICE u32 full_barrier(int n) const { return full + stage(n) * 8; }
  DEVICE void wait_full(int n) const { mbarrier_wait(full_barrier(n), u32(n / STAGES) & 1); }
  DEVICE void wait_empty(int n) const { mbarrier_wait(empty + stage(n) * 8, (u32(n / STAGES) & 1) ^ 1); }  // empty at first
  DEVICE void release(int n, int lane) const {  // by every warp, once it has read the buffer
    if (lane == 0) mbarrier_arrive(empty + stage(n) * 8);
  }
};

// Addresses.
struct BackwardMemory {
  u32 K, V, Q, dO, dS, dQ, lse, delta, K_full, V_full, Q_full, Q_empty, dO_full, dO_empty, dS_full, dS_empty;

  DEVICE explicit BackwardMemory(u32 start)
      : K(start + K_OFFSET), V(start + V_OFFSET), Q(start + Q_OFFSET), dO(start + DO_OFFSET), dS(start + DS_OFFSET),
        dQ(start + DQ_OFFSET), lse(start + LSE_OFFSET), delta(start + DELTA_OFFSET), K_full(start + KV_FULL_OFFSET),
        V_full(K_full + 8), Q_full(start + Q_FULL_OFFSET), Q_empty(start + Q_EMPTY_OFFSET),
        dO_full(start + DO_FULL_OFFSET), dO_empty(start + DO_EMPTY_OFFSET), dS_full(start + DS_FULL_OFFSET),
        dS_empty(start + DS_EMPTY_OFFSET) {}

  DEVICE Turns<NUM_STAGES> Q_turns() const { return {Q_full, Q_empty}; }
  DEVICE Turns<DO_STAGES> dO_turns() const { return {dO_full, dO_empty}; }
  DEVICE Turns<DS_STAGES> dS_turns() const { return {dS_full, dS_empty}; }

  // Full when the thread that asked the copy engine has arrived and its bytes have; dS when all warps have stored their part.
  // Empty when every warp that reads it has arrived.
  DEVICE void init_barriers() const {
    mbarrier_init(K_full, CONSUMERS);
    mbarrier_init(V_full, CONSUMERS);
    for (int i = 0; i < NUM_STAGES; ++i) {
      mbarrier_init(Q_full + 8 * i, 1);
      mbarrier_init(Q_empty + 8 * i, 4 * CONSUMERS);
    }
    for (int i = 0; i < DO_STAGES; ++i) {
      mbarrier_init(dO_full + 8 * i, 1);
      mbarrier_init(dO_empty + 8 * i, 4 * CONSUMERS);
    }
    for (int i = 0; i < DS_STAGES; ++i) {
      mbarrier_init(dS_full + 8 * i, 4 * CONSUMERS);
      mbarrier_init(dS_empty + 8 * i, 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
};
