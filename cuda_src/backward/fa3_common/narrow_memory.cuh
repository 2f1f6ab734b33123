// The shared memory of the backward kernels of head dims to 128, and the part of dQ that each warp adds.
#pragma once
#include "backward/fa3_common/sums.cuh"
#include "backward/fa3_common/traced_consumer.cuh"

// With two buffers of K, persistent blocks overlap items: the step from an item's last tile to the next item's first tile is like
// any other step.
constexpr bool ITEMS_OVERLAP = IS_PERSISTENT && K_STAGES > 1;
// If consumers share the columns of dQ, the last one may have fewer. DQ_IS_UNEVEN: it then issues only its own columns, by a
// second instance of the code. Persistent blocks have no room in the instruction cache for that: both consumers issue DQ_TILES.
constexpr int LAST_DQ_TILES = DQ_BY_ROWS ? DQ_TILES : D_TILES - (CONSUMERS - 1) * DQ_TILES;
constexpr bool DQ_IS_UNEVEN = !IS_PERSISTENT && LAST_DQ_TILES != DQ_TILES && LAST_DQ_TILES > 0;

static_assert(!PAIRED && KEY_TILES == CONSUMERS, "each consumer has 64 keys");
static_assert(DS_STAGES > 1, "dS of two tiles is in use at the same time");
static_assert(DQ_BY_ROWS || Br == 64, "a consumer computes 64 rows of dQ");
static_assert(LAST_DQ_TILES >= 0 && LAST_DQ_TILES <= DQ_TILES, "every column of dQ has a consumer");
static_assert(K_STAGES == 1 || (IS_PERSISTENT && !BULK_ADD), "with two buffers of K, shared memory has no room to stage dQ");

struct NarrowMemory : TileMemory {
  u32 dQ;
  Ring<DS_STAGES> dS_ring;
  DqHandover dQ_handover;

  DEVICE explicit NarrowMemory(u32 start)
      : TileMemory(start), dQ(start + SharedMemory::DQ), dS_ring{start + SharedMemory::DS_FULL, start + SharedMemory::DS_EMPTY},
        dQ_handover(dq_handover(start)) {}

  DEVICE u32 K_of(u32 kv) const { return K + rings.K.stage(kv) * (KEY_TILES * K_TILE_BYTES); }
  DEVICE u32 dS_of(u32 position, int consumer) const {
    return dS + (dS_ring.stage(position) * KEY_TILES + consumer) * DS_PART_BYTES;
  }

  // The part of a tile of the workspace that a warp of consumers adds, and where that part is staged.
  DEVICE static float* dq_of_warp(const KernelParams& p, u32 tile, int consumer, int warp) {
    return dq_address(p, tile, (DQ_BY_ROWS ? consumer * 4 : 0) + warp, DQ_BY_ROWS ? 0 : consumer * DQ_TILES);
  }
  DEVICE static int dq_tiles(int consumer) { return consumer == CONSUMERS - 1 ? LAST_DQ_TILES : DQ_TILES; }  // that exist
  DEVICE u32 staged(int consumer, int warp) const { return dQ + (consumer * 4 + warp) * DQ_WARP_BYTES; }
  // By one thread: the parts of all warps.
  DEVICE void add_staged(const KernelParams& p, u32 tile) const {
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

  // A buffer is full when the thread that starts the copy has arrived and its bytes have landed; a buffer of dS, when all warps
  // have stored their parts. A buffer is empty when every warp that reads it has arrived.
  DEVICE void init_barriers(u32 start) const {
    rings.init();
    Q_ring.init(1, 4 * CONSUMERS);
    dO_ring.init(1, 4 * CONSUMERS);
    dS_ring.init(4 * CONSUMERS, 4 * CONSUMERS);
    if constexpr (DETERMINISTIC) init_dq_handover(start);
    mbarrier_init_fence();
  }
};
