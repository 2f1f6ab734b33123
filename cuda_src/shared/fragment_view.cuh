// One way to walk the accumulator of a product: mma.sync's tiles of 16 x 8, or wgmma's flat 64 x N. In both a lane holds one row
// of each eight rows, and two columns of each eight columns.
//
// Callers get rows and columns as compile-time offsets, multiples of 8 plus e, and add the lane's own row and column (lane_row,
// lane_column).
#pragma once
#include "primitives/primitives.cuh"

// ROWS rows and 2 * TILES columns of one lane. Row r is in 16-row tile r / 2; tiles are M_STRIDE and N_STRIDE floats apart.
template <typename Float, int ROWS_, int TILES_, int M_STRIDE, int N_STRIDE>
struct FragmentView {
  static constexpr int ROWS = ROWS_, TILES = TILES_;
  Float* d;

  static DEVICE int lane_row(int lane) { return lane / 4; }
  static DEVICE int lane_column(int lane) { return lane % 4 * 2; }

  // Column e (0, 1) of tile n in row r.
  DEVICE Float& at(int r, int n, int e) const { return d[r / 2 * M_STRIDE + n * N_STRIDE + r % 2 * 2 + e]; }

  // f(column, value) for row r.
  template <typename F>
  DEVICE void for_each_in_row(int r, F f) const {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) f(8 * n + e, at(r, n, e));
    }
  }

  // f(row, column, value), row after row.
  template <typename F>
  DEVICE void for_each(F f) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) for_each_in_row(r, [&](int column, Float& x) { f(8 * r, column, x); });
  }
};

// mma.sync: 16-row tiles outside, or 8-column tiles outside.
template <int M, int N>
DEVICE FragmentView<float, 2 * M, N, 4 * N, 4> fragment_view(float (&d)[M][N][4]) {
  return {&d[0][0][0]};
}
template <int M, int N>
DEVICE FragmentView<const float, 2 * M, N, 4 * N, 4> fragment_view(const float (&d)[M][N][4]) {
  return {&d[0][0][0]};
}
template <int N, int M>
DEVICE FragmentView<float, 2 * M, N, 4, 4 * M> fragment_view_by_columns(float (&d)[N][M][4]) {
  return {&d[0][0][0]};
}
// One 16-row tile of mma.sync.
template <int N>
DEVICE FragmentView<float, 2, N, 0, 4> fragment_view(float (&d)[N][4]) {
  return {&d[0][0]};
}
// wgmma: the 16 rows of each warp.
template <int COUNT>
DEVICE FragmentView<float, 2, COUNT / 4, 0, 4> fragment_view(float (&d)[COUNT]) {
  return {d};
}
template <int COUNT>
DEVICE FragmentView<const float, 2, COUNT / 4, 0, 4> fragment_view(const float (&d)[COUNT]) {
  return {d};
}

// Register h of the A operand from columns 16k ... 16k + 15 of a 16-row tile: row h % 2, columns h / 2. An accumulator already
// has the layout of an A operand.
template <typename Element, typename View>
DEVICE u32 operand_pair(View P, int m_tile, int k, int h) {
  const int r = 2 * m_tile + h % 2, n = 2 * k + h / 2;
  return Element::pack(P.at(r, n, 0), P.at(r, n, 1));
}
