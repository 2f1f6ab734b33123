// How fa2_backward divides a tile: the keys, queries and columns of each warp, in tiles of mma.sync, and their place in shared
// memory.
#pragma once
#include "backward/fa2/config.cuh"
#include "backward/params.cuh"
#include "backward/common/workspace.cuh"
#include "mma/copy.cuh"
#include "shared/schedule.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int KEY_TILES = WARP_KEYS / 16;                   // 16-row mma tiles of the keys of one warp
constexpr int PARTS = NUM_WARPS / (Bc / WARP_KEYS);         // warps that share keys
constexpr bool SHARED_KEYS = PARTS > 1;
constexpr int PART_QUERIES = Br / PARTS;                    // columns of S^T of one warp
constexpr int CHUNK = PART_QUERIES < 32 ? PART_QUERIES : 32;  // columns of S^T in registers at a time
constexpr int S_TILES = CHUNK / 8;                          // in 8-column mma tiles
constexpr int K_STEPS = (HEAD_DIM + 15) / 16, V_STEPS = (V_DIM + 15) / 16;  // k16 steps of S, dP; the last may be half padding
constexpr int K_TILES = (D_TILES + PARTS - 1) / PARTS;      // 8-column mma tiles of dK of one warp
constexpr int V_TILES = (V_DIM / 8 + PARTS - 1) / PARTS;    // 8-column mma tiles of dV of one warp
constexpr int DQ_ROW_WARPS = Br / 32, DQ_COLUMN_WARPS = NUM_WARPS / DQ_ROW_WARPS;
constexpr int DQ_TILES = (D_TILES + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS;  // 8-column tiles of dQ of one warp, in 32 rows
constexpr int DQ_CHUNKS = DQ_TILES > 4 && DQ_TILES % 2 == 0 ? 2 : 1;  // 2: one is added during the other's products
constexpr int DQ_CHUNK = DQ_TILES / DQ_CHUNKS;
// Half of the warps add to dQ before they visit a tile and half after it: memory takes additions more slowly than all warps at
// once send them. Unless warps share keys, a mask makes this slower, and a soft cap leaves no registers for it.
constexpr bool STAGGERED = NUM_STAGES == 2 && (SHARED_KEYS || (MASK_KIND == MASK_FULL && !SOFTCAP));
constexpr int ROW_BYTES = HEAD_DIM * 2, V_ROW_BYTES = V_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32), V_PITCH = tile_pitch(V_ROW_BYTES, 32);  // of K and Q; of V and dO
constexpr int S_PITCH = tile_pitch(Br * 2, 32);             // of P^T and dS^T: a row per key
constexpr int STAGE_BYTES = Br * PITCH, DO_STAGE_BYTES = Br * V_PITCH;
constexpr int TILE_STATS_BYTES = Br * ROW_STATS_BYTES, TILE_BYTES = Bc * S_PITCH;

// Rows of Q, K and dK, or of dO, V and dV.
template <int COLUMNS, int TILES_, int STEPS_>
struct Rows {
  static constexpr int PITCH = tile_pitch(COLUMNS * 2, 32), TILES = TILES_, ALL_TILES = COLUMNS / 8, STEPS = STEPS_;
  // The warp's first 8-column tile of dK or dV. `of_keys`: its first tile of dK.
  DEVICE static int first_tile(int of_keys, int part) {
    return COLUMNS == HEAD_DIM ? of_keys : min(part * TILES, ALL_TILES - TILES);
  }
};
using OfKeys = Rows<HEAD_DIM, K_TILES, K_STEPS>;
using OfValues = Rows<V_DIM, V_TILES, V_STEPS>;

// Dynamic shared memory: the offset of each buffer, in order.
struct SharedMemory {
  static constexpr int K = 0, V = K + Bc * PITCH;                                  // later dK and dV
  static constexpr int Q = V + Bc * V_PITCH, DO = Q + NUM_STAGES * STAGE_BYTES;      // in stages
  static constexpr int ROWS = DO + NUM_STAGES * DO_STAGE_BYTES;                    // in stages: L and D of each row
  static constexpr int P = ROWS + NUM_STAGES * TILE_STATS_BYTES;                      // SHARED_KEYS: P^T
  static constexpr int DS = P + (SHARED_KEYS ? TILE_BYTES : 0);                    // in stages: dS^T
  static constexpr int BYTES = DS + NUM_STAGES * TILE_BYTES;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/backward/fa2.py must ask for the buffers' bytes");
static_assert(Bc % WARP_KEYS == 0 && WARP_KEYS % 16 == 0 && NUM_WARPS % (Bc / WARP_KEYS) == 0,
              "a warp has whole 16-key tiles, and warps share keys evenly");
static_assert(PART_QUERIES % CHUNK == 0 && CHUNK % 16 == 0, "dV and dK take queries 16 at a time");
static_assert(Br % 32 == 0 && NUM_WARPS % DQ_ROW_WARPS == 0 && DQ_COLUMN_WARPS > 0, "a warp takes 32 rows of dQ");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 8, at most 256");
static_assert(V_DIM % 8 == 0 && V_DIM <= 256, "V_DIM is a multiple of 8, at most 256");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "one or two query tiles in shared memory");
static_assert(SKIP_MASKED_TILES, "key blocks add only to query tiles that see one of their keys");
