// What the three passes of a backward kernel leave for one another in device memory: dQ in float32, to which every key block
// adds, two numbers for each row of queries, and, DETERMINISTIC, how many key blocks have added to each tile of dQ.
//
// dQ is kept as mma.sync has it, 16 x 8 accumulators one after another, so that a warp adds 512 neighbouring bytes at a time;
// the last pass puts it in order. A head begins with a row of accumulators of its own: where seqlen_q is no multiple of 16,
// up to 15 rows per head are padding.
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
  char* rows;    // (batch * heads, seqlen_q) RowNumbers
  u32* turns;    // (batch * heads, query tiles): key blocks that have added to the tile; DETERMINISTIC
  i32 strips;    // of a head

  DEVICE explicit BackwardWorkspace(const BackwardParams& p) {
    const i64 heads = i64(p.batch) * p.heads;
    strips = (p.seqlen_q - 1) / STRIP + 1;
    dQ = static_cast<float*>(p.workspace);
    rows = reinterpret_cast<char*>(dQ + heads * strips * (D_TILES * ACCUMULATOR));
    turns = reinterpret_cast<u32*>(rows + heads * p.seqlen_q * ROW_NUMBER_BYTES);
  }

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
