// What fa2_backward adds to dQ: the product of a tile's dS and the keys, 32 rows and a share of the columns per warp.
#pragma once
#include "backward/fa2/shape.cuh"
#include "mma/product.cuh"

// Alg. 2, l. 15, added to the accumulators at `dQ`: 16-row strips `strip` and `strip` + 1 of the `strips` of a head. The warp
// computes 8-column tiles from `first_dq_tile` on and adds only the tiles from `dq_share` on. `number` names the query tile in an
// inside trace.
DEVICE void add_query_gradients(float* const dQ, int strip, int strips, int first_dq_tile, int dq_share, u32 dS_lane, u32 K_lane,
                                int lane, PhaseLog& inside, u32 number) {
  float dQ_rmem[DQ_CHUNKS][2][DQ_CHUNK][4] = {};
  // Adds accumulators `begin` ... end-1 of a chunk.
  auto add_chunk = [&](int c, int begin, int end) {
#pragma unroll
    for (int x = begin; x < end; ++x) {
      const int i = x / DQ_CHUNK, n = x % DQ_CHUNK, tile_n = c * DQ_CHUNK + n;
      if (strip + i >= strips) continue;
      if (D_TILES % DQ_COLUMN_WARPS != 0 && first_dq_tile + tile_n < dq_share) continue;  // added by another warp
      add_accumulator(dQ + (i * D_TILES + tile_n) * ACCUMULATOR, dQ_rmem[c][i][n], lane);
    }
  };
#pragma unroll
  for (int c = 0; c < DQ_CHUNKS; ++c) {
    constexpr int STEPS = Bc / 16;
    multiply<Element, STEPS, true>(
        {inside, QUERY_GRADIENTS, number}, dQ_rmem[c],
        [&](u32(&dS)[2][4], int k) {
#pragma unroll
          for (int i = 0; i < 2; ++i) ldmatrix_x4_trans(dS[i], dS_lane + k * 16 * S_PITCH + i * 32);
        },
        [&](u32(&B)[4], int n, int k) {
          load_b_pair<true>(B, K_lane + k * 16 * PITCH + (c * DQ_CHUNK + n) * 16, n + 1 < DQ_CHUNK);
        },
        [&](int k) {
          if (c > 0) add_chunk(c - 1, k * 2 * DQ_CHUNK / STEPS, (k + 1) * 2 * DQ_CHUNK / STEPS);
        });
    mma_fence();
  }
  inside.enter(ADD, number);
  add_chunk(DQ_CHUNKS - 1, 0, 2 * DQ_CHUNK);
  inside.enter(NOTHING);
}
