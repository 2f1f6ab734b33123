// Layout of a decode block's shared memory, and of a ring's tiles in it.
#pragma once
#include "decode/config.cuh"
#include "mma/copy_unit.cuh"
#include "shared/parts.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int RINGS = NUM_WARPS / ROW_WARPS;
constexpr int RING_KEYS = Bc / RINGS;  // keys in one stage
constexpr int RING_THREADS = ROW_WARPS * 32;
constexpr int KV_ITEM = FP8_CACHE ? 1 : 2;  // bytes of an element of the cache
constexpr int K_ROW_BYTES = HEAD_DIM * KV_ITEM, V_ROW_BYTES = V_DIM * KV_ITEM;
constexpr int KV_ROW_BYTES = K_ROW_BYTES > V_ROW_BYTES ? K_ROW_BYTES : V_ROW_BYTES;  // row size of both tiles
constexpr int GROUPS = RING_KEYS / 16;  // groups of 16 keys, the k16 step of P V

// A stage holds K, then V. cp.async: rows of KV_PITCH bytes (tile_pitch: eight rows fill all banks). Copy engine: groups of 16
// keys. A row is cut into chunks of 128 bytes; one box brings the same chunk of all 16 rows, and boxes lie one after another.
// 128-byte swizzle: 16-byte unit u of chunk i lies at unit u ^ (i % 8). An ldmatrix has no bank conflicts.
constexpr int CHUNK_BYTES = 128;
constexpr int chunks(int row_bytes) { return (row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES; }
constexpr int KV_PITCH = TMA_COPIES ? chunks(KV_ROW_BYTES) * CHUNK_BYTES : tile_pitch(KV_ROW_BYTES, 16 * KV_ITEM);
constexpr int GROUP_BYTES = 16 * KV_PITCH;
constexpr int KV_TILE_BYTES = GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = 2 * KV_TILE_BYTES;
constexpr int RING_BYTES = NUM_STAGES * STAGE_BYTES;
constexpr int SCALES_BYTES = KEY_SCALES ? 2 * RING_KEYS * 4 : 0;  // bytes per stage: k_scale of the keys, then v_scale
constexpr int Q_PITCH = tile_pitch(HEAD_DIM * 2, 32);
constexpr int O_PITCH = ((V_DIM + 31) / 32 * 32 + 8) * 4;  // four rows of an accumulator fill all banks
constexpr int MAX_SPLITS = CLUSTER_MERGE ? 8 : 0;  // the largest portable cluster
static_assert(NUM_WARPS % ROW_WARPS == 0 && Bc % RINGS == 0, "all rings have equally many warps and keys");
static_assert(RING_KEYS == 16 || RING_KEYS == 32, "a stage holds 16 or 32 keys; each lane holds the page of one key");
static_assert(!TMA_COPIES || RING_KEYS == 16, "TMA_COPIES: one box holds the keys of a stage");

constexpr int round_up(int bytes, int multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Dynamic shared memory: the offset of each buffer, in order.
struct SharedMemory {
  static constexpr int Q = 0;                                                       // Br rows
  static constexpr int KV = round_up(Q + Br * Q_PITCH, TMA_COPIES ? 1024 : 16);     // stages of each ring
  static constexpr int O = KV;                                                      // after the last tile: O of each ring
  static constexpr int KV_END = KV + RINGS * RING_BYTES, O_END = O + RINGS * Br * O_PITCH;
  static constexpr int ML = KV_END > O_END ? KV_END : O_END;                        // m and l of each ring and row
  static constexpr int SHARES = ML + RINGS * Br * 8;                                // one parked BalancedShare per warp
  static constexpr int BARRIERS = SHARES + NUM_WARPS * 32;                          // one mbarrier per ring and stage
  // CLUSTER_MERGE: the data that the other splits of a work item send to this block.
  static constexpr int RECEIVED_O = round_up(BARRIERS + RINGS * NUM_STAGES * 8, 16);
  // + MAX_SPLITS: each split's share of the vectors is rounded up.
  static constexpr int RECEIVED_ML = RECEIVED_O + (CLUSTER_MERGE ? (Br * VECTORS + MAX_SPLITS) * 16 : 0);
  static constexpr int RECEIVED_BARRIER = RECEIVED_ML + Br * MAX_SPLITS * 8;        // one mbarrier
  static constexpr int SCALES = RECEIVED_BARRIER + (CLUSTER_MERGE ? 16 : 0);        // scales of each ring and stage
  static constexpr int BYTES = SCALES + RINGS * NUM_STAGES * SCALES_BYTES;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/decode.py must ask for the bytes that the buffers take");

// m and l of a row's softmax; in shared memory a vec2.
struct RowSums {
  float m, l;

  static DEVICE RowSums load(u32 smem) {
    const vec2 bits = ld_shared_vec2(smem);
    return {u32_as_float(bits.x), u32_as_float(bits.y)};
  }
  static DEVICE float load_m(u32 smem) { return u32_as_float(ld_shared_u32(smem)); }
  DEVICE vec2 bits() const { return {float_as_u32(m), float_as_u32(l)}; }
};

// Whether byte `offset` of a row belongs to a column of K, or of V, and not to the padding of the narrower one.
DEVICE bool is_of_k(int offset) { return K_ROW_BYTES == KV_ROW_BYTES || offset < K_ROW_BYTES; }
DEVICE bool is_of_v(int offset) { return V_ROW_BYTES == KV_ROW_BYTES || offset < V_ROW_BYTES; }

// Address of a 16-byte unit of a row of K. V's unit lies KV_TILE_BYTES further.
DEVICE u32 tile_address(u32 stage, int row, int unit) {
  if constexpr (!TMA_COPIES) return stage + row * KV_PITCH + unit * 16;
  const int chunk = unit / 8 * 16 + row % 16;
  return stage + row / 16 * GROUP_BYTES + chunk * CHUNK_BYTES + (unit ^ chunk) % 8 * 16;
}

// The same address for ldmatrix, in two parts: lane_address(), computed once per lane, has the lane's row and its unit, 0 or 1;
// unit_address() adds the even unit `unit`, a compile-time constant.
DEVICE u32 lane_address(int row, int unit) { return tile_address(0, row, unit); }
DEVICE u32 unit_address(u32 group, u32 lane_share, int unit) {
  if constexpr (!TMA_COPIES) return group + lane_share + unit * 16;
  const int chunk = unit / 8 * 16;
  return ((group + lane_share) ^ ((unit ^ chunk) % 8 * 16)) + chunk * CHUNK_BYTES;
}
