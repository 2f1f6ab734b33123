// The shared memory of backward/fa3_pair/kernel.cu, whose thread blocks work in pairs, and how a block sends its dS to the other.
#pragma once
#include "backward/fa3_common/gradients.cuh"
#include "backward/fa3_common/loader.cuh"
#include "backward/fa3_common/sums.cuh"
#include "backward/fa3_common/traced_consumer.cuh"
#include "primitives/cluster_copy.cuh"

// Columns of dQ: the value warpgroups of a pair have the first and the last atom, each key warpgroup half of the atoms between.
constexpr int ATOMS = atoms(HEAD_DIM);
constexpr int VALUE_COLUMNS = ATOM_COLUMNS, KEY_COLUMNS = (ATOMS - 2) * ATOM_COLUMNS / 2;
static_assert(PAIRED && KEY_TILES == 1 && Br == 64, "two blocks of 64 keys compute 64 rows of dQ");
static_assert(ATOMS == 3 || ATOMS == 4, "the columns of dQ of one consumer lie in one atom");
static_assert(DS_PART_BYTES == 128 * Br / 4 * 4, "P of a tile lies in the buffer of dS: 16-bit pairs, thread by thread");
static_assert(!BULK_ADD && K_STAGES == 1, "dQ is added from registers, and a pair has one key block");

// The rank of the other block of the pair. Ranks are read where they are needed: no register is free to keep one.
DEVICE u32 other_rank() { return cluster_rank() ^ 1; }
// The first column of dQ of a consumer warpgroup.
DEVICE int first_column(bool values, u32 rank) {
  return values ? int(rank) * (ATOMS - 1) * ATOM_COLUMNS : ATOM_COLUMNS + int(rank) * KEY_COLUMNS;
}

struct PairMemory : TileMemory {
  u32 start, other_K;

  DEVICE explicit PairMemory(u32 start) : TileMemory(start), start(start), other_K(start + SharedMemory::OTHER_K) {}

  // The three uses of a buffer of dS: P, this block's dS, and the other block's dS. One mbarrier says that all three are empty.
  DEVICE Ring<DS_STAGES> P_ring() const { return {start + SharedMemory::P_FULL, start + SharedMemory::DS_EMPTY}; }
  DEVICE Ring<DS_STAGES> dS_ring() const { return {start + SharedMemory::DS_FULL, start + SharedMemory::DS_EMPTY}; }
  DEVICE Ring<DS_STAGES> sent_ring() const { return {start + SharedMemory::SENT_FULL, start + SharedMemory::DS_EMPTY}; }

  DEVICE u32 own_ds(u32 n) const { return dS + n % DS_STAGES * (2 * DS_PART_BYTES); }
  DEVICE u32 sent_ds(u32 n) const { return own_ds(n) + DS_PART_BYTES; }

  // A buffer is full when the thread that starts the copy and all its bytes have arrived, or when all storing warps have. It is
  // empty when every warp that reads it has arrived; a buffer of dS, when the reading warps of both blocks have.
  DEVICE void init_barriers() const {
    rings.init();
    Q_ring.init(1, 4 * CONSUMERS);
    dO_ring.init(1, 4 * CONSUMERS);
    dS_ring().init(4, 2 * 4 * CONSUMERS);
    for (int i = 0; i < DS_STAGES; ++i) {
      mbarrier_init(P_ring().full_barrier(i), 4);
      mbarrier_init(sent_ring().full_barrier(i), 1);
    }
    if constexpr (DETERMINISTIC) init_dq_handover(start);
    mbarrier_init_fence();
  }

  // The other block's keys, and the columns of its K that this block needs.
  DEVICE static int other_first_key(const KeyBlock& block) { return block.first_key() ^ WARPGROUP_KEYS; }
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

// By a thread of the producer: sends dS of each tile to the other block once all of it is stored.
struct Sender {
  const KernelParams& p;
  const u32 start;  // of the shared memory

  DEVICE void run() const {
    visit_items(p, start, [&](const TileVisit& at) {
      const PairMemory smem(opaque(start));
      const u32 to = other_rank(), full = smem.sent_ring().full_barrier(at.n);
      smem.dS_ring().wait_full(at.n);
      cluster_copy(cluster_address(smem.sent_ds(at.n), to), smem.own_ds(at.n), DS_PART_BYTES, cluster_address(full, to));
      mbarrier_arrive_expect_tx(full, DS_PART_BYTES);
    });
  }
};
