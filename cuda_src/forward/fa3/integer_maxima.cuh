// Row maxima by integer comparisons, and whether they may raise the maxima of the softmax.
#pragma once
#include "shared/fragment_view.cuh"
#include "shared/softmax.cuh"

// Maximum of each row over this lane's columns, compared by bits as integers: sm_90 compares three in one instruction
// (VIMNMX3). Exact if the maximum is not negative: the bits of negative floats compare in reverse order.
template <typename View>
DEVICE void lane_tops(int (&top)[View::ROWS], View S) {
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    int chain[2] = {int(float_as_u32(S.at(r, 0, 0))), int(float_as_u32(S.at(r, 0, 1)))};
#pragma unroll
    for (int n = 1; n + 1 < View::TILES; n += 2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        chain[c] = max(max(chain[c], int(float_as_u32(S.at(r, n, c)))), int(float_as_u32(S.at(r, n + 1, c))));
      }
    }
    if constexpr (View::TILES % 2 == 0) {
      chain[0] = max(max(chain[0], int(float_as_u32(S.at(r, View::TILES - 1, 0)))),
                     int(float_as_u32(S.at(r, View::TILES - 1, 1))));
    }
    top[r] = max(chain[0], chain[1]);
  }
}

// Whether scores of a warp may raise a maximum, from the lane_tops() of each lane. lane_tops() is exact for maxima above 0. If a
// row's maximum is below -SLACK, scores below 0 could raise it: the answer is yes. NaN counts as raising.
template <int ROWS, int SLACK>
DEVICE bool may_grow(const OnlineSoftmax<ROWS, SLACK>& softmax, const int (&top)[ROWS], float scale_log2) {
  bool may = false;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    may |= !(u32_as_float(u32(top[r])) * scale_log2 <= softmax.m_scaled[r] + SLACK) || softmax.m_scaled[r] < -SLACK;
  }
  return warp_any(may);
}
