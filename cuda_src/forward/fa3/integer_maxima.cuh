// Row maxima by integer comparisons.
#pragma once
#include "shared/fragment_view.cuh"

// Maximum of each row over this lane's columns, compared by bits as integers: sm_90 compares three in one instruction
// (VIMNMX3). Right if the maximum is not negative; among negative scores only, the order of integers is another one.
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
