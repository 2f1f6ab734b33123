// The tiles of fa3_forward_fp8 in shared memory, their mbarriers, and the item descriptors that the producer leaves for
// consumers.
#pragma once
#include "forward/fa3_fp8/config.cuh"
#include "forward/fa3/persistent_items.cuh"
#include "forward/fa3/shared_structs.cuh"
#include "wgmma/pipeline.cuh"
#include "forward/float8_scores.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int GROUP_ROWS = QUERY_BLOCK;       // query rows of one consumer warpgroup
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;  // warpgroup 0 is the producer
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int ATOM_BYTES = 128;               // columns of e4m3 in an atom (wgmma/operands.cuh)
constexpr int V_BOX_ROWS = 16;                // rows of V^T that one copy brings
constexpr int column_atoms(int columns) { return (columns + ATOM_BYTES - 1) / ATOM_BYTES; }
constexpr int tile_bytes(int rows, int columns) { return column_atoms(columns) * rows * ATOM_BYTES; }
constexpr int Q_TILE_BYTES = tile_bytes(GROUP_ROWS, HEAD_DIM), K_TILE_BYTES = tile_bytes(Bc, HEAD_DIM);
constexpr int V_TILE_BYTES = tile_bytes(HEAD_DIM, Bc);  // V^T: a row for each column of V
static_assert(CONSUMERS <= 3, "ScalesOfItem has scales of three consumers");
static_assert(Br == CONSUMERS * GROUP_ROWS, "BLOCK_Q: 64 query rows for each consumer warpgroup");
static_assert(Bc % 32 == 0 && Bc <= 256, "BLOCK_KV: P V takes 32 keys per wgmma, S = Q K^T at most 256");
static_assert(HEAD_DIM % 16 == 0 && ALIGNMENT == 16, "TMA needs rows that begin at multiples of 16 bytes");
static_assert(!is_irregular(MASK_KIND), "fa3_forward_fp8 takes band masks");
static_assert(!ALIBI && !SINK, "fa3_forward_fp8 takes no ALiBi and no sinks");
static_assert(PACKED_HEADS == 1 || PACKED_HEADS == CONSUMERS, "PACKED_HEADS: a consumer has queries of one head");
static_assert(!SPLIT_KEYS || ADDED_TILES <= 1, "SPLIT_KEYS: the end of the workspace has parts, or sums of ADDED_TILES tiles");

// ---- Item descriptors: one query block of one head, the mask of its sequence, the sequence's place in the arrays, and scales.
// A descriptor with q_block NO_MORE_ITEMS follows the last item.
struct alignas(16) Item : WorkItem {
  u32 index;  // index of the work item, for the trace
};
struct alignas(16) SequenceOfItem {
  int sequence_index, stored_rows, first_row, first_key;  // members of RaggedSequence (shared/lengths.cuh)
};
struct alignas(16) ScalesOfItem {
  float qk[3];  // for each consumer: the scale of q, times the scale of k unless K_SCALE is OF_BLOCK
  float v;
};
constexpr int MASK_AT = 16, SEQUENCE_AT = 32, SCALES_AT = 48, ITEM_BYTES = 64;
constexpr int ITEM_DESCRIPTORS = 4;

// ---- Shared memory

struct SharedMemory {
  static constexpr int K_AT = CONSUMERS * Q_TILE_BYTES, V_AT = K_AT + NUM_STAGES * K_TILE_BYTES;
  static constexpr int Q_FULL_AT = V_AT + NUM_STAGES * V_TILE_BYTES, Q_EMPTY_AT = Q_FULL_AT + 8 * CONSUMERS;
  static constexpr int K_FULL_AT = Q_EMPTY_AT + 8 * CONSUMERS, K_EMPTY_AT = K_FULL_AT + 8 * NUM_STAGES;
  static constexpr int V_FULL_AT = K_EMPTY_AT + 8 * NUM_STAGES, V_EMPTY_AT = V_FULL_AT + 8 * NUM_STAGES;
  static constexpr int ITEMS_AT = (V_EMPTY_AT + 8 * NUM_STAGES + 15) / 16 * 16;
  static constexpr int BYTES = ITEMS_AT + ITEM_BYTES * ITEM_DESCRIPTORS;
  static_assert(K_AT % 1024 == 0 && V_AT % 1024 == 0, "tiles with a 128-byte swizzle begin at multiples of 1024 bytes");
  static_assert(V_TILE_BYTES % 1024 == 0 || NUM_STAGES == 1, "every stage of V begins at a multiple of 1024 bytes");
  static_assert(BYTES == SMEM_BYTES, "cufa/kernels/forward/fa3_fp8.py: shared_memory() must list these buffers");

  u32 start, Q = start, K = start + K_AT, V = start + V_AT, Q_full = start + Q_FULL_AT, Q_empty = start + Q_EMPTY_AT;

  DEVICE RingCursor<NUM_STAGES> K_ring() const { return {start + K_FULL_AT, start + K_EMPTY_AT}; }
  DEVICE RingCursor<NUM_STAGES> V_ring() const { return {start + V_FULL_AT, start + V_EMPTY_AT}; }
  DEVICE u32 item(u32 round) const { return start + ITEMS_AT + ITEM_BYTES * (round % ITEM_DESCRIPTORS); }

  // full: one arrival (the thread that issues the copy) and the bytes of the copy. empty: one arrival of each warp that reads.
  DEVICE void init_barriers() const {
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(Q_full + 8 * i, 1);
      mbarrier_init(Q_empty + 8 * i, 4);  // the warps of one consumer
    }
    K_ring().init(1, 4 * CONSUMERS);
    V_ring().init(1, 4 * CONSUMERS);
    mbarrier_init_fence();
  }
};

// The key tiles that a query block of ROWS rows visits; none for a block past the end of its sequence.
template <int ROWS>
DEVICE TileRange tiles_of(const HeadMask& mask, int block) {
  if (mask.keys == 0 || block * ROWS >= mask.rows) return {};
  return mask.tiles<ROWS, Bc, SKIP_MASKED_TILES>(block);
}

// The key tiles that this thread block visits for a query block.
DEVICE TileRange tiles_of_split(const AttentionParams& p, const HeadMask& mask, int q_block) {
  const TileRange tiles = tiles_of<HEAD_ROWS>(mask, q_block);
  if constexpr (SPLIT_KEYS) return split_tiles(p, tiles, int(blockIdx.y));
  return tiles;
}

// Those of `tiles` that `block` has.
DEVICE TileRange within(TileRange tiles, const TileRange& block) {
  tiles.first = max(tiles.first, block.first);
  tiles.end = min(tiles.end, block.end);
  tiles.clear_first = max(tiles.clear_first, block.first);
  tiles.clear_end = min(tiles.clear_end, block.end);
  if (tiles.clear_first >= tiles.clear_end) tiles.clear_first = tiles.clear_end = tiles.first;
  if (tiles.first >= tiles.end) return {};
  return tiles;
}

// The 64-row group of a consumer's rows among those of its head, and the head.
DEVICE int group_of(const WorkItem& item, int consumer) {
  return PACKED_HEADS == 1 ? item.q_block * CONSUMERS + consumer : item.q_block;
}
DEVICE int head_of(const WorkItem& item, int consumer) { return PACKED_HEADS == 1 ? item.head : item.head + consumer; }

// SPLIT_KEYS: parts are at the end of the workspace, after transposed values.
DEVICE float* first_part(const Float8Params& p) {
  i64 tiles = i64(p.batch) * (p.heads / PACKED_HEADS) * ((p.seqlen_q - 1) / HEAD_ROWS + 1);
  if constexpr (LENGTHS_KIND == PACKED) tiles = i64(p.heads) * num_packed_blocks<HEAD_ROWS>(p.total_q, p.batch);
  return static_cast<float*>(p.workspace) + p.mask.workspace / 4 - tiles * p.num_splits * BLOCK_Q * SLOT_ROW;
}
