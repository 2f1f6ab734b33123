// What the three passes of a backward kernel leave for one another in device memory: dQ in float32, to which every key block
// adds, two numbers for each row of queries, and, DETERMINISTIC, how many key blocks have added to each tile of dQ.
//
// dQ is kept as mma.sync has it, 16 x 8 accumulators one after another, so that a warp adds 512 neighbouring bytes at a time;
// the last pass puts it in order. A head begins with a row of accumulators of its own: where seqlen_q is no multiple of 16,
// up to 15 rows per head are padding. WHOLE_TILES: a head has whole query tiles instead, each with the numbers of its rows
// behind its dQ, so that one index says where all of it lies and nothing is tested; and blocks take items by a counter.
//
// Of packed sequences a head has one row of strips, and of tiles, in which each sequence has its own (first_packed_block).
#pragma once
#include "backward_params.cuh"
#include "primitives/reduction.cuh"
#include "tiles/fragments.cuh"
#include "tiles/lengths.cuh"

// Four neighbours can be added at once from sm_90 on. Else each of the four registers of a warp has 128 bytes to itself.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool WIDE_ADDITIONS = false;
#else
constexpr bool WIDE_ADDITIONS = true;
#endif

constexpr int STRIP = 16;                // rows of one accumulator
constexpr int D_TILES = HEAD_DIM / 8;    // accumulators side by side
constexpr int ACCUMULATOR = STRIP * 8;   // floats

// Log-sum-exp in units of log2 (P = exp2(scale_log2 * s - lse)), of float32 as it was given; and delta: what the softmax of
// a row sends back.
struct RowNumbers {
  float lse, delta;
};
constexpr int ROW_NUMBER_BYTES = 8;

constexpr int RECORD_VECTORS = 3;  // of an item: see KeyBlock in backward_block.cuh
constexpr int TILE_STRIPS = BLOCK_Q / STRIP;
// WHOLE_TILES: dQ, then lse, then delta of each row, then the tile's turns.
constexpr int TILE_FLOATS = BLOCK_Q * (HEAD_DIM + 2) + (DETERMINISTIC ? 32 : 0);
constexpr int HEADER_FLOATS = 32;  // before the tiles: they begin on multiples of 128 bytes, as additions in memory do
static_assert(!WHOLE_TILES || TILE_FLOATS % 32 == 0, "whole lines of the cache");
static_assert(!WHOLE_TILES || TILE_STRIPS % 4 == 0, "records of items behind the numbers of strips are aligned");

struct BackwardWorkspace {
  float* dQ;   // (batch * heads, strips, D_TILES) accumulators; WHOLE_TILES: (batch * heads, tiles, TILE_FLOATS)
  char* rows;  // (batch * heads, seqlen_q) RowNumbers; WHOLE_TILES: none
  u32* next;   // WHOLE_TILES: the item that is to be taken next
  vec4* items;  // WHOLE_TILES: (key blocks * batch * kv_heads, RECORD_VECTORS), in the order in which they are taken
  u32* turns;  // (batch * heads, query tiles), DETERMINISTIC; WHOLE_TILES: none, they are with their tiles
  float* sinks;  // SINK: (batch * heads, strips), what each strip adds to dsink; WHOLE_TILES: before the items
  i32 strips;  // of a head

  DEVICE explicit BackwardWorkspace(const BackwardParams& p) {
    const i64 heads = num_heads(p);
    next = static_cast<u32*>(p.workspace);
    dQ = static_cast<float*>(p.workspace) + (WHOLE_TILES ? HEADER_FLOATS : 0);
    strips = WHOLE_TILES ? tiles(p) * TILE_STRIPS
             : LENGTHS_KIND == PACKED ? num_packed_blocks<STRIP>(p.total_q, p.batch) : (p.seqlen_q - 1) / STRIP + 1;
    rows = reinterpret_cast<char*>(dQ + heads * strips * (D_TILES * ACCUMULATOR));
    items = reinterpret_cast<vec4*>(dQ + heads * tiles(p) * TILE_FLOATS);
    turns = reinterpret_cast<u32*>(rows + heads * (LENGTHS_KIND == PACKED ? p.total_q : p.seqlen_q) * ROW_NUMBER_BYTES);
    sinks = reinterpret_cast<float*>(turns + (DETERMINISTIC ? heads * tiles(p) : 0));
    if constexpr (WHOLE_TILES && SINK) {
      sinks = reinterpret_cast<float*>(items);
      items = reinterpret_cast<vec4*>(sinks + heads * strips);
    }
  }

  // Over the batch, where a sequence has its own strips.
  DEVICE static i64 num_heads(const BackwardParams& p) {
    return LENGTHS_KIND == PACKED ? i64(p.heads) : i64(p.batch) * p.heads;
  }
  // Query tiles of a head, each of which has a turn.
  DEVICE static u32 tiles(const BackwardParams& p) {
    return LENGTHS_KIND == PACKED ? num_packed_blocks<BLOCK_Q>(p.total_q, p.batch) : u32(p.seqlen_q - 1) / BLOCK_Q + 1;
  }

  // WHOLE_TILES: how many have added to a tile that is the `index`th of all; two counters, where its columns are added in parts.
  DEVICE static u32* turn(const BackwardParams& p, u32 index) {
    return reinterpret_cast<u32*>(tile(p, index) + BLOCK_Q * (HEAD_DIM + 2));
  }
  DEVICE static u32 num_items(const BackwardParams& p) {
    return (u32(p.seqlen_k - 1) / BLOCK_KV + 1) * u32(p.batch) * u32(p.kv_heads);
  }
  // WHOLE_TILES: where the `index`th of all tiles lies.
  DEVICE static float* tile(const BackwardParams& p, u32 index) {
    return static_cast<float*>(p.workspace) + HEADER_FLOATS + i64(index) * TILE_FLOATS;
  }

  // The accumulators of one strip of a head, `head` counted over the batch.
  DEVICE float* strip(i64 head, int strip_number) const {
    if constexpr (WHOLE_TILES) {
      return dQ + (head * strips + strip_number) / TILE_STRIPS * TILE_FLOATS +
             strip_number % TILE_STRIPS * (D_TILES * ACCUMULATOR);
    }
    return dQ + (head * strips + strip_number) * (D_TILES * ACCUMULATOR);
  }
  // WHOLE_TILES: lse of a row of a head's strips; its delta lies BLOCK_Q floats behind.
  DEVICE float* lse(i64 head, int row) const {
    return dQ + (head * (strips / TILE_STRIPS) + row / BLOCK_Q) * TILE_FLOATS + BLOCK_Q * HEAD_DIM + row % BLOCK_Q;
  }
};

// Where register `c` of `lane` lies in an accumulator.
DEVICE int accumulator_place(int lane, int c) { return WIDE_ADDITIONS ? lane * 4 + c : c * 32 + lane; }

DEVICE void add_accumulator(float* target, const float (&d)[4], int lane) {
  if constexpr (WIDE_ADDITIONS) {
    red_add_f32x4(target + lane * 4, d[0], d[1], d[2], d[3]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) red_add_f32(target + accumulator_place(lane, c), d[c]);
  }
}
