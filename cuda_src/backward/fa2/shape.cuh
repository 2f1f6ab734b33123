// How fa2_backward cuts a tile up: which keys, queries and columns a warp has, in tiles of mma.sync, and where they lie in
// shared memory.
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
constexpr int PART_QUERIES = Br / PARTS;                    // columns of S^T of one warp,
constexpr int CHUNK = PART_QUERIES < 32 ? PART_QUERIES : 32;  // and how many of them are in registers at a time
constexpr int S_TILES = CHUNK / 8;                          // in 8-column mma tiles
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;               // k16 steps of S and dP; the last may be half padding
constexpr int O_TILES = (D_TILES + PARTS - 1) / PARTS;      // 8-column mma tiles of dK and dV of one warp
constexpr int DQ_ROW_WARPS = Br / 32, DQ_COLUMN_WARPS = NUM_WARPS / DQ_ROW_WARPS;
constexpr int DQ_TILES = (D_TILES + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS;  // likewise of dQ, in 32 rows:
constexpr int DQ_CHUNKS = DQ_TILES > 4 && DQ_TILES % 2 == 0 ? 2 : 1;  // many in two runs, the first added under the second
constexpr int DQ_CHUNK = DQ_TILES / DQ_CHUNKS;
// Half of the warps add to dQ before they visit a tile and half behind it: memory takes additions more slowly than they
// come from all warps at once. (With a softcap there are no registers for it where warps have keys of their own.)
constexpr bool STAGGERED = NUM_STAGES == 2 && (SHARED_KEYS || (MASK_KIND == MASK_FULL && !SOFTCAP));
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32);
constexpr int S_PITCH = tile_pitch(Br * 2, 32);             // of P^T and dS^T: a row per key
constexpr int STAGE_BYTES = Br * PITCH, NUMBERS_BYTES = Br * ROW_NUMBER_BYTES, TILE_BYTES = Bc * S_PITCH;

// Dynamic shared memory: the offset of each buffer, in order.
struct SharedMemory {
  static constexpr int K = 0, V = K + Bc * PITCH;                                  // later dK and dV
  static constexpr int Q = V + Bc * PITCH, DO = Q + NUM_STAGES * STAGE_BYTES;      // in stages
  static constexpr int ROWS = DO + NUM_STAGES * STAGE_BYTES;                       // in stages: L and D of each row
  static constexpr int P = ROWS + NUM_STAGES * NUMBERS_BYTES;                      // SHARED_KEYS: P^T
  static constexpr int DS = P + (SHARED_KEYS ? TILE_BYTES : 0);                    // in stages: dS^T
  static constexpr int BYTES = DS + NUM_STAGES * TILE_BYTES;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/backward/fa2.py must ask for the bytes that the buffers take");
static_assert(Bc % WARP_KEYS == 0 && WARP_KEYS % 16 == 0 && NUM_WARPS % (Bc / WARP_KEYS) == 0, "keys of a warp");
static_assert(PART_QUERIES % CHUNK == 0 && CHUNK % 16 == 0, "dV and dK take queries 16 at a time");
static_assert(Br % 32 == 0 && NUM_WARPS % DQ_ROW_WARPS == 0 && DQ_COLUMN_WARPS > 0, "a warp takes 32 rows of dQ");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "one tile is computed while the next is copied, or afterwards");
static_assert(SKIP_MASKED_TILES, "blocks that see nothing of a tile do not add to it");
