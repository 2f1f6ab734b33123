// A row of O joined to the running result of earlier keys, in float32 (RUNNING): attention over keys that arrive in pieces, from
// other GPUs or from host memory, without a merge kernel and without rounding between pieces. With O and lse of this launch
// and O', lse' of the keys before,
//   lse_new = log(e^lse + e^lse'),   O_new = O e^(lse - lse_new) + O' e^(lse' - lse_new).
#pragma once
#include "shared/params.cuh"
#include "shared/softmax.cuh"
#include "wgmma/accumulator.cuh"

struct RunningParams : AttentionParams {
  float* running;      // O of the keys so far, (batch, heads, seqlen_q, head_dim), divided by its sum
  float* running_lse;  // (batch, heads, seqlen_q), natural log
  Strides running_stride;
  i64 lse_batch, lse_head;     // strides of running_lse; the last axis is contiguous
  i32 fresh_first, fresh_end;  // rows without an earlier result: neither array is read
  i32 done_first, done_end;    // rows that are finished: O goes to `o`, not to `running`
};

// Row r of a lane (0: lane / 4, 1: 8 below), row `row` of the queries. `inverse` is the factor of `O`, 1 / l, or 0 if the row saw
// no key; `lse` its log-sum-exp. All lanes take part.
template <int TILES, typename Element>
DEVICE void join_running_row(const RunningParams& p, int head, int batch, int row, const float (&O)[4 * TILES], int r,
                             float inverse, float lse, int lane) {
  const bool exists = row < p.seqlen_q, fresh = row >= p.fresh_first && row < p.fresh_end;
  const bool done = row >= p.done_first && row < p.done_end;
  float* const lse_at = p.running_lse + batch * p.lse_batch + head * p.lse_head + row;
  float* const running = p.running + batch * p.running_stride.batch + head * p.running_stride.head +
                         row * p.running_stride.seq + lane % 4 * 2;
  float kept = 0.0f;  // factor of the earlier O
  if (exists && !fresh) {
    const float earlier = ld_global<float>(lse_at), m = fmaxf(lse, earlier);
    if (m != NEG_INF) {
      const float weight = ex2((lse - m) * LOG2_E), kept_weight = ex2((earlier - m) * LOG2_E);
      const float total = weight + kept_weight;
      inverse *= weight / total;
      kept = kept_weight / total;
      lse = m + lg2(total) * LN_2;
    }
  }
  warp_sync();  // the four lanes of a row have read the earlier lse, which one of them overwrites
  if (exists && lane % 4 == 0) st_global(lse_at, lse);
  float joined[4 * TILES];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    vec2 before = {0, 0};
    if (kept != 0.0f) before = ld_global<vec2>(running + n * 8);
    joined[4 * n + 2 * r] = O[4 * n + 2 * r] * inverse + u32_as_float(before.x) * kept;
    joined[4 * n + 2 * r + 1] = O[4 * n + 2 * r + 1] * inverse + u32_as_float(before.y) * kept;
    if (exists && !done) {
      st_global(running + n * 8, vec2{float_as_u32(joined[4 * n + 2 * r]), float_as_u32(joined[4 * n + 2 * r + 1])});
    }
  }
  if (warp_any(done)) {
    char* const out = static_cast<char*>(p.o) +
                      2 * (batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.seq);
    store_accumulator_row<TILES, Element>(out, joined, r, 1.0f, exists && done, lane);
  }
}
