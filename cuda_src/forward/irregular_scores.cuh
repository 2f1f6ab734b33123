// Scores under an irregular mask, for the forward kernels. (The backward: backward/common/mask_by_keys.cuh.)
#pragma once
#include "shared/fragment_view.cuh"
#include "shared/irregular_mask.cuh"

// Scores that the mask hides become -inf. `row` is the lane's first row, `lane_column` its first column in a tile whose first key
// is `first_key`. RUNS_AT_ONCE: 1 if registers do not suffice for the loads of two runs. ASK_FIRST: if a test hides nothing from
// the rows of a warp, its lanes skip the test.
template <int RUNS_AT_ONCE = 2, bool ASK_FIRST = false, MaskKind KIND, typename Params, typename View>
DEVICE void hide_scores(View S, const IrregularMask<KIND, Params>& mask, int row, int first_key, int lane_column) {
  const int key = first_key + lane_column;
  if constexpr (IrregularMask<KIND, Params>::BITS) {
    hide_by_bits(S, mask.workspace.runs, mask.words_of_line(), row, mask.rows, key, mask.keys);
    return;
  }
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const int i = row + 8 * r, last = int(u32(i) + u32(mask.last));
    const int end = min(mask.keys, last + 1) - key, begin = int(u32(i) + u32(mask.first)) - key;
    int low = 0;  // columns before `low` are visible even outside of the band
    if constexpr (IrregularMask<KIND, Params>::SETS) {
      low = i < mask.exempt ? mask.keys - key : max(mask.prefix - key, min(mask.keep - key, end));
    }
    constexpr int LAST_COLUMN = 8 * View::TILES - 7;
    if (ASK_FIRST && !warp_any(low <= LAST_COLUMN && (begin > 0 || end <= LAST_COLUMN))) continue;
    S.for_each_in_row(r, [&](int column, float& s) {
      const bool in_band = column >= begin && column < end;
      if (!(in_band || (IrregularMask<KIND, Params>::SETS && column < low))) s = NEG_INF;
    });
  }
  constexpr int RUNS = IrregularMask<KIND, Params>::RUNS;
  const int runs_of_all = RUNS_AT_ONCE == 1 && RUNS > 0 ? int(opaque(RUNS)) : RUNS;  // opaque: the loop is not unrolled
#pragma unroll RUNS_AT_ONCE
  for (int run = 0; run < runs_of_all; ++run) {
    if constexpr (ASK_FIRST) {
      const RunExtremes x = mask.extremes(run, first_key / BLOCK_KV);
      if (!warp_any(row < x.greatest_hi && row + 8 >= x.least_lo)) continue;
    }
    const char* runs = mask.workspace.run(mask.first_run + run, key);
#pragma unroll
    for (int n = 0; n < View::TILES; ++n) {
      const vec4 two = ld_global<vec4>(runs + n * 8 * MaskWorkspace<Params, 1>::RUN_BYTES);  // runs of two neighbouring keys
      u32 lo[2] = {two.x, two.z}, length[2] = {two.y, two.w};
      if constexpr (LENGTHS_KIND != DENSE) lo[0] -= u32(mask.run_offset), lo[1] -= u32(mask.run_offset);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 past = u32(row) - lo[e];
#pragma unroll
        for (int r = 0; r < View::ROWS; ++r) {
          if (past + 8 * r < length[e]) S.at(r, n, e) = NEG_INF;
        }
      }
    }
  }
}
