// How fa2_backward_f32 divides a tile: the keys, queries and columns of each warp, in tiles of mma.sync, and their place in
// shared memory; and P in units that float16 holds.
#pragma once
#include "backward/fa2_f32/config.cuh"
#include "backward/params.cuh"
#include "backward/common/workspace.cuh"
#include "mma/copy.cuh"
#include "mma/half_pair.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int KEY_TILES = WARP_KEYS / 16;                   // 16-row mma tiles of the keys of one warp
constexpr int PARTS = NUM_WARPS / (Bc / WARP_KEYS);         // warps that share keys
constexpr int PART_QUERIES = Br / PARTS;                    // columns of S^T of one warp
constexpr int S_TILES = PART_QUERIES / 8;                   // in 8-column mma tiles, and groups of eight queries
constexpr int SUM_STEPS = 2;                                // k16 steps of S or dP that the tensor cores sum
constexpr int O_GROUP = BLOCKS_PER_SM > 2 ? 2 : 3;           // 8-column tiles computed at a time: more take more registers
constexpr int Q_TILES = Br / 16;                            // 16-row mma tiles of dQ: every warp takes all rows
constexpr int DQ_TILES = (D_TILES + NUM_WARPS - 1) / NUM_WARPS;  // 8-column mma tiles of dQ of one warp
constexpr int DQ_GROUP = 4;
constexpr int S_PITCH = tile_pitch(Br * 4, 64);  // of P^T and dS^T: a row per key

// Rows of Q, K and dK, or of dO, V and dV.
template <int COLUMNS_>
struct Rows {
  static constexpr int COLUMNS = COLUMNS_, BYTES = COLUMNS * 4, PITCH = tile_pitch(BYTES, 64);
  static constexpr int STEPS = (COLUMNS + 15) / 16;            // k16 steps of S or dP; the last may be half padding
  static constexpr int ALL_TILES = COLUMNS / 8, TILES = (ALL_TILES + PARTS - 1) / PARTS;  // 8-column mma tiles; of a warp
  using Copy = RowCopy<BYTES, PITCH, ALIGNMENT>;
};
using OfKeys = Rows<HEAD_DIM>;
using OfValues = Rows<V_DIM>;
constexpr int PITCH = OfKeys::PITCH, V_PITCH = OfValues::PITCH;

// Dynamic shared memory: the offset of each buffer, in order.
struct SharedMemory {
  static constexpr int K = 0, V = K + Bc * PITCH, Q = V + Bc * V_PITCH, DO = Q + Br * PITCH;  // float32, then pairs of float16
  static constexpr int ROWS = DO + Br * V_PITCH;           // L and D of each row
  static constexpr int S = ROWS + Br * ROW_STATS_BYTES;   // P^T, then dS^T
  static constexpr int LARGEST = S + Bc * S_PITCH;         // the largest dS of each warp
  static constexpr int BYTES = LARGEST + NUM_WARPS * 4;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/backward/fa2_f32.py must ask for the buffers' bytes");
static_assert(Bc % WARP_KEYS == 0 && WARP_KEYS % 16 == 0 && NUM_WARPS % (Bc / WARP_KEYS) == 0,
              "a warp has whole 16-key tiles, and warps share keys evenly");
static_assert(Br % (8 * PARTS) == 0 && Br % 16 == 0,
              "a warp has whole groups of 8 queries, and a tile whole k16 steps of dV and dK");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 8, at most 256");
static_assert(V_DIM % 8 == 0 && V_DIM <= 256, "V_DIM is a multiple of 8, at most 256");
static_assert(NUM_STAGES == 1, "one stage: the next tile is copied over the current one");
static_assert(SKIP_MASKED_TILES, "key blocks add only to query tiles that see one of their keys");

// P of one row. In units of log2 the log-sum-exp needs more digits than a float has: the rounding error becomes a factor of P.
struct Exponent {
  float lse, factor;

  DEVICE Exponent(float natural) {
    constexpr float LOG2_E_REST = 1.92596299e-8f;  // log2(e) - LOG2_E
    lse = natural * LOG2_E;
    factor = fmaf(-LN_2, fmaf(natural, LOG2_E_REST, fmaf(natural, LOG2_E, -lse)), 1.0f);
  }
  DEVICE float weight(float s, float scale_log2) const { return ex2(fmaf(s, scale_log2, -lse)) * factor; }
};

// A warp's share of the products. Recomputed where it is used: registers are scarce.
struct Share {
  int warp = thread_id() / 32;

  DEVICE int key_group() const { return warp / PARTS; }
  DEVICE u32 keys() const { return key_group() * WARP_KEYS; }  // the first of its keys
  DEVICE u32 queries() const { return warp % PARTS * PART_QUERIES; }  // the first of the queries whose S and dP it computes
  // The first columns of dK and dV, and of dQ. If the head dim is not a multiple of all shares, the last warps start earlier and
  // recompute columns of other warps: others() and others_dq() say which.
  template <typename Of>
  DEVICE int first_tile(Of) const {
    return min(warp % PARTS * Of::TILES, Of::ALL_TILES - Of::TILES);
  }
  DEVICE int first_dq_tile() const { return min(warp * DQ_TILES, D_TILES - DQ_TILES); }
  template <typename Of>
  DEVICE bool others(Of, int tile) const {
    return Of::ALL_TILES % PARTS != 0 && tile < warp % PARTS * Of::TILES;
  }
  DEVICE bool others_dq(int tile) const { return D_TILES % NUM_WARPS != 0 && tile < warp * DQ_TILES; }
  // The first group of eight rows that a warp copies and splits; of the following groups it takes every NUM_WARPS-th. If there
  // are enough warps, different warps take dO and Q.
  DEVICE int first_dO_group() const { return warp; }
  DEVICE int first_Q_group() const { return Br / 8 < NUM_WARPS ? (warp + NUM_WARPS - Br / 8) % NUM_WARPS : warp; }
};
