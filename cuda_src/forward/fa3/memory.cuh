// The tiles of fa3_forward, and where they lie in shared memory with their mbarriers and with the descriptors that the producer
// leaves for consumers.
#pragma once
#include "forward/fa3/config.cuh"
#include "forward/cache.cuh"
#include "forward/fa3/shared_structs.cuh"
#include "forward/splits.cuh"
#include "wgmma/pipeline.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int GROUP_ROWS = 64;                 // query rows of one consumer warpgroup: the 64 rows of a wgmma
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;   // warpgroup 0 is the producer
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int Q_TILE_BYTES = wgmma_tile_bytes(GROUP_ROWS, HEAD_DIM), O_TILE_BYTES = wgmma_tile_bytes(GROUP_ROWS, V_DIM);
constexpr int K_TILE_BYTES = wgmma_tile_bytes(Bc, HEAD_DIM), V_TILE_BYTES = wgmma_tile_bytes(Bc, V_DIM);
static_assert(Br == CONSUMERS * GROUP_ROWS, "BLOCK_Q: 64 query rows for each consumer warpgroup");
static_assert(Bc % 16 == 0 && Bc <= 256, "BLOCK_KV: P V takes 16 keys per wgmma, S = Q K^T at most 256");
static_assert(ALIGNMENT == 16, "TMA needs rows that begin at multiples of 16 bytes");

// The tiles of a query block come from a range, or from a list: if the mask is irregular, or if lengths are read on the device.
constexpr bool LISTED = is_irregular(MASK_KIND) || LENGTHS_KIND != DENSE;
static_assert(!LISTED || SKIP_MASKED_TILES, "LISTED: a list holds only tiles with a visible score");
constexpr int LIST_STAGES = 4;  // entries of the ring between the lister and the loaders

// Keys in a cache: TMA copies a tile box by box, and a list entry says where each box lies.
static_assert(CACHED == (PAGE_BOX > 0) && (!CACHED || (Bc % PAGE_BOX == 0 && PAGE_BOX % 8 == 0)),
              "a tile of keys in a cache is a whole number of boxes, whose rows are swizzled eight at a time");
constexpr int BOXES = CACHED ? Bc / PAGE_BOX : 0;
constexpr int ENTRY_BYTES = 16 + (8 * BOXES + 15) / 16 * 16;
static_assert(BOXES <= 32, "a lane of the lister looks up one box");

// The key tiles that a query block visits.
DEVICE TileRange tiles_of(const AttentionParams& p, int q_block) { return block_tiles<Bc>(p, q_block); }

// ---- Item descriptors: data that the producer leaves for consumers, which have no registers to compute it again.

// One query block of one head. After the last item comes a descriptor with q_block NO_MORE_ITEMS.
struct alignas(16) Item : WorkItem {
  u32 index;  // index of the work item, for the trace
};
// A LISTED descriptor also holds the item's mask. With lengths: HeadMask, of the item's sequence. Else MASK_SETS: SetsOfItem.
struct alignas(16) SetsOfItem {
  int prefix, keep, exempt, unused;  // IrregularMask
};
// With lengths: the item's sequence.
struct alignas(16) SequenceOfItem {
  int sequence_index, stored_rows, first_row, first_key;  // RaggedSequence
};
// With lengths and an irregular mask, in the place of SequenceOfItem. The sequence's Band is at MASK_AT.
struct alignas(16) MaskOfItem {
  int prefix_or_run, keep, exempt, first_key;  // IrregularMask: MASK_SETS has a prefix, other masks first_run
};
constexpr int MASK_AT = 16, SEQUENCE_AT = 32;   // bytes of a descriptor before these
constexpr int RUNS_AT = 16, EXTREMES_AT = 24;   // masks with runs or bits: the two pointers of MaskWorkspace
constexpr int ITEM_BYTES = LISTED ? 48 : 16;
// Descriptors in use at once: one that the producer writes, the next item's, and two of the consumers: the item that they
// compute and the one that they store. The lister may be ahead by one item for each entry of the list.
constexpr int ITEM_DESCRIPTORS = LISTED ? 4 + LIST_STAGES : 4;

// ---- Shared memory

constexpr int up_to_16(int bytes) { return (bytes + 15) / 16 * 16; }

struct SharedMemory {
  // Offsets of the buffers, in order. Q has a tile and two mbarriers for each stage and consumer, stage after stage.
  static constexpr int Q_BUFFERS = Q_STAGES * CONSUMERS;
  static constexpr int K_AT = Q_BUFFERS * Q_TILE_BYTES, V_AT = K_AT + NUM_STAGES * K_TILE_BYTES;
  static constexpr int Q_FULL_AT = V_AT + NUM_STAGES * V_TILE_BYTES, Q_EMPTY_AT = Q_FULL_AT + 8 * Q_BUFFERS;
  static constexpr int K_FULL_AT = Q_EMPTY_AT + 8 * Q_BUFFERS, K_EMPTY_AT = K_FULL_AT + 8 * NUM_STAGES;
  static constexpr int V_FULL_AT = K_EMPTY_AT + 8 * NUM_STAGES, V_EMPTY_AT = V_FULL_AT + 8 * NUM_STAGES;
  static constexpr int ITEMS_AT = up_to_16(V_EMPTY_AT + 8 * NUM_STAGES);
  static constexpr int TILES_AT = ITEMS_AT + 48 * (4 + LIST_STAGES);  // LISTED: which tile is in each buffer of K
  static constexpr int LIST_AT = up_to_16(TILES_AT + 8 * NUM_STAGES);  // LISTED: the tiles to visit, and its mbarriers
  static constexpr int LIST_FULL_AT = LIST_AT + ENTRY_BYTES * LIST_STAGES, LIST_EMPTY_AT = LIST_FULL_AT + 8 * LIST_STAGES;
  static constexpr int TAIL_FULL_AT = LIST_EMPTY_AT + 8 * LIST_STAGES;  // with lengths: a V tile without its zeros yet
  static constexpr int TREE_AT = TAIL_FULL_AT + 8;  // CACHED: for each buffer of K, what 64 tokens of a TREE see of each other
  static constexpr int BYTES = TREE_AT + (CACHED ? 512 * NUM_STAGES : 0);
  static_assert(K_AT % 1024 == 0 && V_AT % 1024 == 0, "tiles with a 128-byte swizzle begin at multiples of 1024 bytes");
  static_assert(ITEM_BYTES * ITEM_DESCRIPTORS <= TILES_AT - ITEMS_AT, "the descriptors must fit their buffer");
  static_assert(BYTES == SMEM_BYTES, "cufa/kernels/forward/fa3.py must ask for the bytes that the buffers take");

  // Addresses.
  u32 start, Q = start, K = start + K_AT, V = start + V_AT, Q_full = start + Q_FULL_AT, Q_empty = start + Q_EMPTY_AT;
  u32 list = start + LIST_AT, tail_full = start + TAIL_FULL_AT;

  DEVICE RingCursor<NUM_STAGES> K_ring() const { return {start + K_FULL_AT, start + K_EMPTY_AT}; }
  DEVICE RingCursor<NUM_STAGES> V_ring() const { return {start + V_FULL_AT, start + V_EMPTY_AT}; }
  DEVICE RingCursor<LIST_STAGES> list_ring() const { return {start + LIST_FULL_AT, start + LIST_EMPTY_AT}; }
  DEVICE u32 item(u32 round) const { return start + ITEMS_AT + ITEM_BYTES * (round % ITEM_DESCRIPTORS); }
  DEVICE u32 entry(int stage) const { return list + ENTRY_BYTES * stage; }
  DEVICE u32 tile(int stage) const { return start + TILES_AT + 8 * stage; }
  DEVICE u32 tree(int stage) const { return start + TREE_AT + 512 * stage; }

  // A buffer is full when the thread that asked TMA for it has arrived and all its bytes have landed. A buffer is empty when
  // every warp that reads it has arrived.
  DEVICE void init_barriers() const {
    for (int i = 0; i < Q_BUFFERS; ++i) {
      mbarrier_init(Q_full + 8 * i, 1);
      mbarrier_init(Q_empty + 8 * i, 4);  // the warps of one consumer
    }
    for (int i = 0; i < NUM_STAGES; ++i) {
      mbarrier_init(K_ring().full + 8 * i, TREE ? 2 : 1);  // TREE: by KeyLoader and TreeLoader
      mbarrier_init(V_ring().full + 8 * i, 1);
      mbarrier_init(K_ring().empty + 8 * i, 4 * CONSUMERS);
      mbarrier_init(V_ring().empty + 8 * i, 4 * CONSUMERS);
    }
    if constexpr (LISTED) {
      list_ring().init(1, TREE ? 3 : 2);  // read by K's loader, V's, and the tree's
      mbarrier_init(tail_full, 1);
    }
    mbarrier_init_fence();
  }
};
