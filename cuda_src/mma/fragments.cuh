// 16-bit mma operands out of shared-memory tiles.
//
// Every function takes the address of this lane's element of the tile's first matrix (`lane_offset_*`); the rest of the address
// is then a compile-time constant: row * PITCH + column * 2.
#pragma once
#include "primitives/ldmatrix.cuh"
#include "primitives/mma.cuh"
#include "shared/element.cuh"

// D (16 x 8, float32) += A (16 x 16) B (16 x 8), by a warp.
template <typename Element>
DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (Element::IS_BFLOAT16) {
    mma_m16n8k16_bf16(d, a, b0, b1);
  } else {
    mma_m16n8k16_f16(d, a, b0, b1);
  }
}

// ldmatrix takes the row addresses of four 8x8 matrices from lanes 0-7, 8-15, 16-23, 24-31. Here: (rows 0-7, columns 0-7), (rows
// 8-15, columns 0-7), (rows 0-7, columns 8-15), (rows 8-15, columns 8-15). They are the registers of an A operand stored row by
// row (Q) and, transposed, of two neighbouring B operands stored with k along the rows (V).
template <int PITCH>
DEVICE u32 lane_offset_rows_first(int lane) {
  return lane % 16 * PITCH + lane / 16 * 16;
}

// (rows 0-7, columns 0-7), (rows 0-7, columns 8-15), (rows 8-15, columns 0-7), (rows 8-15, columns 8-15): two
// neighbouring B operands stored with k along the columns (K: its rows are the columns of S).
template <int PITCH>
DEVICE u32 lane_offset_columns_first(int lane) {
  return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
}

// An accumulator as one 16-byte vector.
DEVICE vec4 accumulator_bits(const float (&a)[4]) {
  return {float_as_u32(a[0]), float_as_u32(a[1]), float_as_u32(a[2]), float_as_u32(a[3])};
}
DEVICE void set_accumulator(float (&a)[4], vec4 bits) {
  a[0] = u32_as_float(bits.x);
  a[1] = u32_as_float(bits.y);
  a[2] = u32_as_float(bits.z);
  a[3] = u32_as_float(bits.w);
}

// Stores an A operand to shared memory, row by row; `smem` is the tile's first element.
template <int PITCH>
DEVICE void store_a_operand(u32 smem, const u32 (&a)[4], int lane) {
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    st_shared_u32(smem + (h % 2 * 8 + lane / 4) * PITCH + h / 2 * 16 + lane % 4 * 4, a[h]);
  }
}

// Each row of accumulators times its factor. Row r of a lane is row r % 2 * 8 + lane / 4 of mma tile r / 2.
template <int M_TILES, int N_TILES>
DEVICE void scale_rows(float (&d)[M_TILES][N_TILES][4], const float (&factor)[2 * M_TILES]) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][n][e] *= factor[i * 2 + e / 2];
    }
  }
}
