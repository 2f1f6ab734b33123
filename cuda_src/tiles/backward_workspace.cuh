// What the three passes of a backward kernel leave for one another in device memory: dQ in float32, to which every key block
// adds, two numbers for each row of queries, and, DETERMINISTIC, how many key blocks have added to each tile of dQ.
//
// dQ is kept as mma.sync has it, 16 x 8 accumulators one after another, so that a warp adds 512 neighbouring bytes at a time;
// the last pass puts it in order. A head begins with a row of accumulators of its own: where seqlen_q is no multiple of 16,
// up to 15 rows per head are padding. WHOLE_TILES: a head has whole query tiles instead, so that they are added and loaded
// without a test, and the two numbers lie apart, as the copy engine takes them.
#pragma once
#include "backward_params.cuh"
#include "primitives/reduction.cuh"
#include "tiles/fragments.cuh"

// Four neighbours can be added at once from sm_90 on. Else each of the four registers of a warp has 128 bytes to itself.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool WIDE_ADDITIONS = false;
#else
constexpr bool WIDE_ADDITIONS = true;
#endif

constexpr int STRIP = 16;                // rows of one accumulator
constexpr int D_TILES = HEAD_DIM / 8;    // accumulators side by side
constexpr int ACCUMULATOR = STRIP * 8;   // floats

// Log-sum-exp in units of log2 (P = exp2(scale_log2 * s - lse)) and delta: what the softmax of a row sends back.
struct RowNumbers {
  float lse, delta;
};
constexpr int ROW_NUMBER_BYTES = 8;

struct BackwardWorkspace {
  float* dQ;     // (batch * heads, strips, D_TILES) accumulators
  char* rows;    // (batch * heads, seqlen_q) RowNumbers; WHOLE_TILES: all lse, then all delta, (batch * heads, strips * 16)
  u32* turns;    // (batch * heads, query tiles): key blocks that have added to the tile; DETERMINISTIC
  i32 strips;    // of a head
  i64 all_rows;  // that have numbers

  DEVICE explicit BackwardWorkspace(const BackwardParams& p) {
    const i64 heads = i64(p.batch) * p.heads;
    strips = WHOLE_TILES ? ((p.seqlen_q - 1) / BLOCK_Q + 1) * (BLOCK_Q / STRIP) : (p.seqlen_q - 1) / STRIP + 1;
    all_rows = heads * (WHOLE_TILES ? strips * STRIP : p.seqlen_q);
    dQ = static_cast<float*>(p.workspace);
    rows = reinterpret_cast<char*>(dQ + heads * strips * (D_TILES * ACCUMULATOR));
    turns = reinterpret_cast<u32*>(rows + all_rows * ROW_NUMBER_BYTES);
  }

  // WHOLE_TILES: the numbers from row `row` of a head on.
  DEVICE float* lse(i64 head, int row) const { return reinterpret_cast<float*>(rows) + head * strips * STRIP + row; }
  DEVICE float* delta(i64 head, int row) const { return lse(head, row) + all_rows; }

  // The accumulators of one strip of a head, `head` counted over the batch.
  DEVICE float* strip(i64 head, int strip_number) const {
    return dQ + (head * strips + strip_number) * (D_TILES * ACCUMULATOR);
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
