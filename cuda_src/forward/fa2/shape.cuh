// How fa2_forward divides a tile: the rows, keys and columns of each warp, in tiles of mma.sync, and their place in shared
// memory.
#pragma once
#include "forward/fa2/config.cuh"
#include "forward/cache.cuh"
#include "mma/copy.cuh"
#include "forward/splits.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = Br / (NUM_WARPS / COLUMN_WARPS);  // query rows of one warp
constexpr int M_TILES = WARP_ROWS / 16;                     // 16-row mma tiles of one warp
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;               // k16 steps of S = Q K^T; the last may be half padding
constexpr int WARP_KEYS = Bc / COLUMN_WARPS;                // columns of S of one warp
constexpr int S_TILES = WARP_KEYS / 8;                      // 8-column mma tiles of S of one warp
constexpr int O_TILES = (V_DIM / 8 + COLUMN_WARPS - 1) / COLUMN_WARPS;  // 8-column mma tiles of O of one warp
constexpr int ROW_BYTES = HEAD_DIM * 2, V_ROW_BYTES = V_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32), V_PITCH = tile_pitch(V_ROW_BYTES, 32);
constexpr int Q_PITCH = PITCH > V_PITCH ? PITCH : V_PITCH;  // pitch of Q: O leaves through its buffer
constexpr int P_PITCH = tile_pitch(Bc * 2, 32);
constexpr bool PAIRED = COLUMN_WARPS == 2;

constexpr int K_BYTES = Bc * PITCH, STAGE_BYTES = K_BYTES + Bc * V_PITCH;

// Dynamic shared memory: the offset of each buffer, in order. If v has the columns of q, the padding of Q and of all stages is
// filled together.
struct SharedMemory {
  static constexpr int Q = 0;                                  // Br rows; later O
  static constexpr int STAGES = Q + Br * Q_PITCH;              // of each stage K, then V
  static constexpr int P = STAGES + NUM_STAGES * STAGE_BYTES;  // PAIRED: Br rows of Bc keys
  static constexpr int M = P + (PAIRED ? Br * P_PITCH : 0);    // PAIRED: a row maximum of each warp of a pair
  static constexpr int BYTES = M + (PAIRED ? 2 * Br * 4 : 0);
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa2.py must ask for the bytes that the buffers take");
static_assert(WARP_ROWS % 16 == 0 && Br % WARP_ROWS == 0, "a warp owns whole 16-row tiles");
static_assert(WARP_KEYS % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 8, at most 256");
static_assert(V_DIM % 8 == 0 && V_DIM <= 256, "V_DIM is a multiple of 8, at most 256");
static_assert(NUM_STAGES == 2, "one tile is computed while the next is copied");
static_assert(HEAD_ROWS % WARP_ROWS == 0, "the rows of a warp are of one head");
static_assert(COLUMN_WARPS == 1 || COLUMN_WARPS == 2, "a warp is alone or in a pair");

// Zeroes the columns after a row's last that products read.
DEVICE void zero_paddings(u32 Q_smem, u32 stages_smem, int thread) {
  if constexpr (HEAD_DIM == V_DIM) {
    if constexpr (HEAD_DIM % 16 != 0) zero_padding<Br + 4 * Bc, ROW_BYTES, PITCH, NUM_THREADS>(Q_smem, thread);
    return;
  }
  if constexpr (HEAD_DIM % 16 != 0) zero_padding<Br, ROW_BYTES, Q_PITCH, NUM_THREADS>(Q_smem, thread);
#pragma unroll
  for (int stage = 0; stage < NUM_STAGES; ++stage) {
    const u32 K_smem = stages_smem + stage * STAGE_BYTES;
    if constexpr (HEAD_DIM % 16 != 0) zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(K_smem, thread);
    if constexpr (V_DIM % 16 != 0) zero_padding<Bc, V_ROW_BYTES, V_PITCH, NUM_THREADS>(K_smem + K_BYTES, thread);
  }
}

// Q stays in registers if O, S and Q together leave 64 registers for the rest of the loop; 88 if v is wider than q.
constexpr int REGISTERS = 65536 / (NUM_THREADS * BLOCKS_PER_SM), REGISTER_LIMIT = REGISTERS < 255 ? REGISTERS : 255;
constexpr bool Q_IN_REGISTERS = M_TILES * 4 * (K_STEPS + S_TILES + O_TILES) + (V_DIM > HEAD_DIM ? 88 : 64) <= REGISTER_LIMIT;
