// Constants derived from the choices of Hopper's backward kernels: shares of a tile, registers, shared memory.
#pragma once
#include "backward/common/workspace.cuh"
#include "primitives/register_budget.cuh"
#include "wgmma/operands.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;  // warpgroup 0 is the producer
constexpr int WARPGROUP_KEYS = 64;            // rows of S^T of one warpgroup
constexpr bool PAIRED = CLUSTER == 2;         // the two blocks of a cluster share the keys of a key block
constexpr int BLOCK_KEYS = Bc / CLUSTER;      // keys of one thread block
constexpr int KEY_TILES = BLOCK_KEYS / WARPGROUP_KEYS;  // of K and V of one thread block
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr bool IRREGULAR = is_irregular(MASK_KIND), RAGGED = LENGTHS_KIND != DENSE;

constexpr int K_STEPS = (HEAD_DIM + 15) / 16, V_STEPS = (V_DIM + 15) / 16;  // k16 steps of S, dP; TMA fills the last with zeros
constexpr int K_TILE_BYTES = wgmma_tile_bytes(WARPGROUP_KEYS, HEAD_DIM), V_TILE_BYTES = wgmma_tile_bytes(WARPGROUP_KEYS, V_DIM);
constexpr int Q_TILE_BYTES = wgmma_tile_bytes(Br, HEAD_DIM), DO_TILE_BYTES = wgmma_tile_bytes(Br, V_DIM);
constexpr int TILE_STATS_BYTES = Br * 4;                                // L or -D
constexpr int DS_PART_BYTES = Br * ATOM_ROW_BYTES;                      // dS of 64 keys: a row per query
constexpr int ATOM_BYTES = WARPGROUP_KEYS * ATOM_ROW_BYTES;             // 64 columns of K of 64 keys

// The part of a tile's dQ that one consumer of the narrow kernels computes: 64 of its rows; or, of tiles with 64 rows, a share of
// the columns, which lie in one atom of K.
constexpr bool DQ_BY_ROWS = Br == 64 * CONSUMERS;
constexpr int DQ_TILES = DQ_BY_ROWS                 ? D_TILES
                         : HEAD_DIM <= ATOM_COLUMNS ? (D_TILES + CONSUMERS - 1) / CONSUMERS
                                                    : ATOM_COLUMNS / 8;
constexpr int DQ_WARP_BYTES = DQ_TILES * ACCUMULATOR * 4;  // of one warp's 16 rows

// Registers of each thread. With these, ptxas spills in no build of the covering set.
struct RegisterBudget {
  int producer, consumer;
};
constexpr RegisterBudget REGISTERS = IS_PERSISTENT ? RegisterBudget{40, 232}  // the producer also prepares and converts
                                                   : RegisterBudget{24, 240};

constexpr int ITEM_STAGES = 3;  // item descriptors: of the previous item, of the current one, and of the next
constexpr int DESCRIPTOR_BYTES = 16 * ITEM_VECTORS;
// Capacity of the list of a key block's query tiles (irregular masks); listed_tiles() of fa3_config.py refuses longer ones.
constexpr int LISTED_TILES = IS_PERSISTENT ? 0 : !PAIRED ? 4096 : DS_STAGES > 1 ? 2048 : 384;
constexpr int OTHER_COLUMNS = 2 * ATOM_COLUMNS;  // PAIRED: columns of the other block's K, an atom for each consumer
constexpr int BACKGROUND_WARPS = 2, BACKGROUND_SLOTS = 2;  // of a persistent block; strips of each warp (background.cuh)

constexpr int aligned(int offset, int to) { return (offset + to - 1) / to * to; }

// Dynamic shared memory: the offset of each buffer, in order. FULL and EMPTY are mbarriers, 8 bytes for each stage.
struct SharedMemory {
  static constexpr int K = 0;
  static constexpr int OTHER_K = K + K_STAGES * KEY_TILES * K_TILE_BYTES;  // PAIRED: two atoms of the other block's K
  static constexpr int V = OTHER_K + (PAIRED ? WARPGROUP_KEYS * OTHER_COLUMNS * 2 : 0);
  static constexpr int Q = V + KEY_TILES * V_TILE_BYTES;
  static constexpr int DO = Q + NUM_STAGES * Q_TILE_BYTES;
  static constexpr int DS = DO + DO_STAGES * DO_TILE_BYTES;               // of all Bc keys
  static constexpr int DQ = DS + DS_STAGES * (Bc / WARPGROUP_KEYS) * DS_PART_BYTES;  // BULK_ADD: staged by each warp
  static constexpr int LSE = DQ + (BULK_ADD ? 4 * CONSUMERS * DQ_WARP_BYTES : 0);
  static constexpr int NEG_DELTA = LSE + NUM_STAGES * TILE_STATS_BYTES;
  static constexpr int ITEMS = NEG_DELTA + DO_STAGES * TILE_STATS_BYTES;   // ITEM_STAGES descriptors
  static constexpr int ITEM_FULL = ITEMS + ITEM_STAGES * DESCRIPTOR_BYTES, ITEM_EMPTY = ITEM_FULL + 8 * ITEM_STAGES;
  static constexpr int K_FULL = ITEM_EMPTY + 8 * ITEM_STAGES, K_EMPTY = K_FULL + 8 * K_STAGES;
  static constexpr int V_FULL = K_EMPTY + 8 * K_STAGES, V_EMPTY = V_FULL + 8;
  static constexpr int Q_FULL = V_EMPTY + 8, Q_EMPTY = Q_FULL + 8 * NUM_STAGES;
  static constexpr int DO_FULL = Q_EMPTY + 8 * NUM_STAGES, DO_EMPTY = DO_FULL + 8 * DO_STAGES;
  static constexpr int DS_FULL = DO_EMPTY + 8 * DO_STAGES, DS_EMPTY = DS_FULL + 8 * DS_STAGES;
  static constexpr int DQ_FULL = DS_EMPTY + 8 * DS_STAGES, DQ_EMPTY = DQ_FULL + 8;
  static constexpr int TAIL_FULL = DQ_EMPTY + 8;                          // RAGGED: one mbarrier for each loader
  static constexpr int SEQUENCE = aligned(TAIL_FULL + 2 * 8, 16);         // RAGGED: a SequenceDescriptor
  static constexpr int LIST = SEQUENCE + 32;                              // irregular masks: the tiles to visit
  static constexpr int BACKGROUND = LIST + 4 * LISTED_TILES;              // IS_PERSISTENT: strips to prepare or convert
  static constexpr int P_FULL = BACKGROUND + (IS_PERSISTENT ? BACKGROUND_WARPS * BACKGROUND_SLOTS * STRIP_FLOATS * 4 : 0);
  static constexpr int SENT_FULL = P_FULL + (PAIRED ? 8 * DS_STAGES : 0);  // PAIRED: dS of the other block
  static constexpr int BYTES = SENT_FULL + (PAIRED ? 8 * DS_STAGES : 0);
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "fa3_config.py must ask for the bytes that the buffers take");
static_assert(ALIGNMENT == 16, "TMA needs 16-byte aligned rows");
static_assert(CONSUMERS == 2, "the register budgets are those of two consumer warpgroups");
static_assert(registers_suffice(REGISTERS.producer, CONSUMERS, REGISTERS.consumer),
              "setmaxnreg of a consumer would wait forever");
static_assert(BLOCK_KEYS % WARPGROUP_KEYS == 0 && Br % 16 == 0, "wgmma computes 64 keys of 16 queries or more");
static_assert(NUM_STAGES > 1 && DO_STAGES > 1, "Q and dO of two tiles are in use at the same time");
static_assert(SKIP_MASKED_TILES, "tickets count only the key blocks that see some score of a query tile");
static_assert(!PAIRED || !IS_PERSISTENT, "a pair of thread blocks takes one item");
