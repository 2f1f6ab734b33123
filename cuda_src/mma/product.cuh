// A product of one warp on mma.sync, D += A B over STEPS k16 steps. Operands are loaded ahead of their use, because ldmatrix
// takes longer than the few products of a pair: B one pair of 8-column tiles ahead, A one step ahead if it comes from shared
// memory (A_AHEAD).
#pragma once
#include "primitives/stmatrix.cuh"
#include "mma/fragments.cuh"
#include "mma/traced_waits.cuh"

// Two neighbouring B operands, or only the first.
template <bool TRANSPOSED>
DEVICE void load_b_pair(u32 (&b)[4], u32 smem, bool both) {
  if (both) {
    TRANSPOSED ? ldmatrix_x4_trans(b, smem) : ldmatrix_x4(b, smem);
  } else {
    u32 half[2];
    TRANSPOSED ? ldmatrix_x2_trans(half, smem) : ldmatrix_x2(half, smem);
    b[0] = half[0];
    b[1] = half[1];
  }
}

// load_a(A operands of all 16-row tiles, step); load_b(pair of B operands, its first 8-column tile, step); between(step) overlaps
// with the products of the step.
template <typename Element, int STEPS, bool A_AHEAD, int M, int N, typename LoadA, typename LoadB, typename Between>
DEVICE void multiply(Stamp stamp, float (&D)[M][N][4], LoadA load_a, LoadB load_b, Between between) {
  constexpr int PAIRS = (N + 1) / 2;
  u32 A[2][M][4], B[2][4];
  stamp.enter();
  if (A_AHEAD) load_a(A[0], 0);
  load_b(B[0], 0, 0);
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    if (!A_AHEAD) load_a(A[k % 2], k);
    if (A_AHEAD && k + 1 < STEPS) load_a(A[(k + 1) % 2], k + 1);
#pragma unroll
    for (int x = 0; x < PAIRS; ++x) {
      const int next = k * PAIRS + x + 1;
      if (next < STEPS * PAIRS) load_b(B[next % 2], next % PAIRS * 2, next / PAIRS);
      const u32(&b)[4] = B[(next + 1) % 2];
#pragma unroll
      for (int i = 0; i < M; ++i) {
        mma_m16n8k16<Element>(D[i][2 * x], A[k % 2][i], b[0], b[1]);
        if (2 * x + 1 < N) mma_m16n8k16<Element>(D[i][2 * x + 1], A[k % 2][i], b[2], b[3]);
      }
    }
    between(k);
  }
}

// Stores an A operand to shared memory, row by row; `smem` is the tile's first element. One instruction from sm_90 on.
template <int PITCH>
DEVICE void store_operand(u32 smem, const u32 (&a)[4], int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  store_a_operand<PITCH>(smem, a, lane);
#else
  stmatrix_x4(smem + lane_offset_rows_first<PITCH>(lane), a);
#endif
}
