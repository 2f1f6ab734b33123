// The shared memory of backward/fa3_pair/kernel.cu, whose thread blocks work in pairs: a tile of keys and one of values, what is
// needed of the other block's K, rings of queries, of gradients of O and of dS; and how a block sends its dS to the other.
#pragma once
#include "primitives/cluster_copy.cuh"
#include "backward/fa3_common/gradients.cuh"
#include "backward/fa3_common/loader.cuh"
#include "backward/fa3_common/sums.cuh"

constexpr int ATOMS = atoms(HEAD_DIM), ATOM_BYTES = GROUP_KEYS * ATOM_ROW_BYTES;  // of K
// Columns of dQ: the value groups of a pair have the first and the last atom, the key groups what lies between, by halves.
constexpr int VALUE_COLUMNS = ATOM_COLUMNS, KEY_COLUMNS = (ATOMS - 2) * ATOM_COLUMNS / 2;
static_assert(PAIRED && KEY_GROUPS == 1 && Br == 64, "two blocks of 64 keys, 64 rows of dQ");
static_assert(ATOMS == 3 || ATOMS == 4, "no run of columns crosses an atom");
static_assert(K_BYTES == KEY_TILE_BYTES + 2 * ATOM_BYTES && V_BYTES == KEY_TILE_BYTES, "and what is needed of the other block's K");
static_assert(Q_BYTES == NUM_STAGES * QUERY_TILE_BYTES && DO_BYTES == DO_STAGES * QUERY_TILE_BYTES, "rings of tiles");
static_assert(DS_BYTES == DS_STAGES * 2 * DS_PART_BYTES, "the block's own, and the other's");
static_assert(DS_PART_BYTES == 128 * Br / 4 * 4, "P of a tile lies there: 16-bit pairs, thread by thread");
static_assert(LSE_BYTES == NUM_STAGES * NUMBERS_BYTES && DELTA_BYTES == DO_STAGES * NUMBERS_BYTES, "numbers of their tiles");
static_assert(Q_FULL_BYTES == 8 * NUM_STAGES && Q_EMPTY_BYTES == Q_FULL_BYTES, "a barrier a tile");
static_assert(DO_FULL_BYTES == 8 * DO_STAGES && DO_EMPTY_BYTES == DO_FULL_BYTES, "likewise");
static_assert(DS_FULL_BYTES == 8 * DS_STAGES && DS_EMPTY_BYTES == DS_FULL_BYTES, "likewise");
static_assert(P_FULL_BYTES == DS_FULL_BYTES && SENT_FULL_BYTES == DS_FULL_BYTES, "for each of these buffers");
static_assert(DQ_EMPTY_BYTES == 8 && DQ_FULL_BYTES == 8 && !BULK_ADD, "turns, of what is not staged");
static_assert(NUM_STAGES > 1 && DO_STAGES > 1, "tiles of two turns are in use");

// Where a block stands in its pair: read where it is needed, for it has no register to lie in.
DEVICE u32 other_rank() { return cluster_rank() ^ 1; }
// The first column of dQ of a group of consumers.
DEVICE int first_column(bool values, u32 rank) {
  return values ? int(rank) * (ATOMS - 1) * ATOM_COLUMNS : ATOM_COLUMNS + int(rank) * KEY_COLUMNS;
}

struct WideMemory {
  static constexpr int OTHER_COLUMNS = 2 * ATOM_COLUMNS;  // of the other block's K: an atom for each group of consumers
  u32 K, V, Q, dO, dS, lse, delta, barriers, other_K;
  ItemBarriers items;

  DEVICE explicit WideMemory(u32 start)
      : K(start + K_OFFSET), V(start + V_OFFSET), Q(start + Q_OFFSET), dO(start + DO_OFFSET), dS(start + DS_OFFSET),
        lse(start + LSE_OFFSET), delta(start + DELTA_OFFSET), barriers(start), other_K(K + KEY_TILE_BYTES), items(start) {}

  DEVICE Ring<NUM_STAGES> Q_turns() const { return {barriers + Q_FULL_OFFSET, barriers + Q_EMPTY_OFFSET}; }
  DEVICE Ring<DO_STAGES> dO_turns() const { return {barriers + DO_FULL_OFFSET, barriers + DO_EMPTY_OFFSET}; }
  // Of buffers of dS: P is there; the block's own dS is; the other's is. They are empty together.
  DEVICE Ring<DS_STAGES> P_turns() const { return {barriers + P_FULL_OFFSET, barriers + DS_EMPTY_OFFSET}; }
  DEVICE Ring<DS_STAGES> dS_turns() const { return {barriers + DS_FULL_OFFSET, barriers + DS_EMPTY_OFFSET}; }
  DEVICE Ring<DS_STAGES> sent_turns() const { return {barriers + SENT_FULL_OFFSET, barriers + DS_EMPTY_OFFSET}; }
  DEVICE DqHandover dQ_handover() const { return {barriers + DQ_FULL_OFFSET, barriers + DQ_EMPTY_OFFSET}; }
  DEVICE u32 own_ds(u32 n) const { return dS + n % DS_STAGES * (2 * DS_PART_BYTES); }
  DEVICE u32 sent_ds(u32 n) const { return own_ds(n) + DS_PART_BYTES; }

  // Full when the thread that asked the copy engine has arrived and its bytes have, or all warps that store have stored their part.
  // Empty when every warp that reads has arrived, of dS those of both blocks.
  DEVICE void init_barriers() const {
    items.init();
    Q_turns().init(1, 4 * CONSUMERS);
    dO_turns().init(1, 4 * CONSUMERS);
    dS_turns().init(4, 2 * 4 * CONSUMERS);
    for (int i = 0; i < DS_STAGES; ++i) {
      mbarrier_init(P_turns().full_barrier(i), 4);
      mbarrier_init(sent_turns().full_barrier(i), 1);
    }
    if constexpr (DETERMINISTIC) init_dq_handover(dQ_handover());
    mbarrier_init_fence();
  }

  // Of the other block's keys: where they begin, and the columns of K that this block needs of them.
  DEVICE static int other_first_key(const KeyBlock& block) { return block.first_key() ^ GROUP_KEYS; }
  DEVICE void load_other_keys(const KeyBlock& block, int first, u32 barrier, const TensorMap* map) const {
    mbarrier_arrive_expect_tx(barrier, 2 * ATOM_BYTES);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int column = first_column(a == 0, cluster_rank()) / ATOM_COLUMNS * ATOM_COLUMNS;
      tma_load_4d(other_K + a * ATOM_BYTES, map, barrier, column, block.key_in_arrays() + first, block.kv_head(),
                  block.batch_in_arrays());
    }
  }
};

// By a thread of the producer: sends dS of each tile to the other block, once all of it is stored.
struct Sender {
  const BackwardParams& p;
  const u32 start;  // of the shared memory

  DEVICE void run() const {
    visit_items(p, start, [&](const TileVisit& at) {
      const WideMemory smem(opaque(start));
      const u32 to = other_rank(), full = smem.sent_turns().full_barrier(at.n);
      smem.dS_turns().wait_full(at.n);
      cluster_copy(cluster_address(smem.sent_ds(at.n), to), smem.own_ds(at.n), DS_PART_BYTES, cluster_address(full, to));
      mbarrier_arrive_expect_tx(full, DS_PART_BYTES);
    });
  }
};
