// Score functions (shared/score_function.cuh) in backward kernels: P needs the changed scores, dS the derivative with respect to
// the old ones, and arrays may have gradients.
#pragma once
#include "backward/common/exact_sums.cuh"
#include "backward/params.cuh"
#include "primitives/reduction.cuh"
#include "shared/dropout.cuh"
#include "shared/score_function.cuh"
#include "shared/softcap.cuh"

using KernelParams =
    typename Choose<DROPOUT, typename Choose<SCORE, ScoredDroppedBackwardParams, DroppedBackwardParams>::type,
                    typename Choose<SCORE, ScoredBackwardParams, BackwardParams>::type>::type;
using Function = ScoreFunction<KernelParams>;

constexpr bool DS_HAS_SLOPE = SOFTCAP || Function::HAS_SLOPE;  // dS is P o (dP - D) times the derivative of P's exponent
constexpr bool DS_HAS_WEIGHTS = DS_HAS_SLOPE || DROPOUT;       // dS takes other weights than dV
constexpr bool SCORE_GRADIENTS = Function::GRADIENTS > 0;

// Whether the arguments of hyperbolic tangents are near 0.
template <bool SMALL>
struct Near {};

// A score after score function and soft cap, before ALiBi; and its derivative with respect to the score before them. A hidden
// score, -inf, stays hidden.
struct ChangedScore {
  float s, slope, cap;  // the slope of the soft cap is a factor of `slope`

  template <bool SMALL = false>
  DEVICE ChangedScore(const KernelParams& p, const Function& function, float old, const typename Function::Row& row,
                      const typename Function::Column& column, Near<SMALL> = {}) {
    if constexpr (SCORE) {
      s = function.template value<SMALL>(old, row, column);
      slope = Function::HAS_SLOPE ? function.template slope<SMALL>(old, row, column) : 1.0f;
      if constexpr (SOFTCAP) {
        s = tanh_of(s * p.softcap);
        cap = fmaf(-s, s, 1.0f);
        slope *= cap;
      } else {
        cap = 1.0f;
      }
      if (old == NEG_INF) s = NEG_INF, slope = 0.0f;
    }
  }
  DEVICE float times_slope(float P) const { return P * slope; }
};

// Where a score is hidden, dS is 0 and a derivative may be NaN.
DEVICE float times_weight(float dS, float derivative) { return dS == 0.0f ? 0.0f : dS * derivative; }

// The prepare pass: zeros in the gradients of arrays, by all its threads.
template <int THREADS, typename Params>
DEVICE void zero_score_gradients(const Params& p) {
  if constexpr (SCORE_GRADIENTS && DETERMINISTIC) {
    ExactSums<Params>{p}.template clear<THREADS>();
  } else if constexpr (SCORE_GRADIENTS) {
    const ScoreArray* const arrays[4] = {&p.array0, &p.array1, &p.array2, &p.array3};
    float* const gradients[4] = {p.dscore0, p.dscore1, p.dscore2, p.dscore3};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (gradients[n] == nullptr) continue;
      const ScoreArray& x = *arrays[n];
      const i64 count = i64(x.size0) * x.size1 * x.size2 * x.size3;
      for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < count; i += i64(gridDim.x) * THREADS) {
        st_global(gradients[n] + i, 0.0f);
      }
    }
  }
}

// The convert pass: gradients of arrays from their exact sums.
template <int THREADS, typename Params>
DEVICE void round_score_gradients(const Params& p) {
  if constexpr (SCORE_GRADIENTS && DETERMINISTIC) ExactSums<Params>{p}.template round<THREADS>();
}

// This lane's sums for the gradients of arrays. Neighbouring scores often read the same element (a clipped distance): their sum
// stays in a register until another element follows.
struct ArrayGradients {
  static constexpr int COUNT = SCORE_GRADIENTS ? Function::GRADIENTS : 1;
  int held[COUNT];  // the element that `sum` is for; -1: none
  float sum[COUNT];

  DEVICE ArrayGradients() {
#pragma unroll
    for (int g = 0; g < COUNT; ++g) held[g] = -1, sum[g] = 0.0f;
  }

  // Adds a tile of S^T, by all lanes of a warp. The score of key 8r and query 8t + e, from the lane's first, read element
  // place(r, t, e); value(r, t, e) is its contribution to that element's gradient.
  template <int G, int ROWS, int TILES, typename Target, typename Place, typename Value>
  DEVICE void add(Target* target, const Place& place, const Value& value) {
    bool same = true;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int x = 0; x < 2 * ROWS; ++x) same = same && place(x / 2, t, x % 2) == held[G];
    }
    if (!warp_any(!same)) {
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int x = 0; x < 2 * ROWS; ++x) sum[G] += value(x / 2, t, x % 2);
      }
      return;
    }
    // Along diagonals: all scores of a diagonal read the same element of a table of distances.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int d = 1 - ROWS; d < TILES; ++d) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int t = d + r;
          if (t < 0 || t >= TILES) continue;
          const int next = place(r, t, e);
          if (next != held[G]) {
            pass_on<G>(target);
            held[G] = next;
            sum[G] = 0.0f;
          }
          sum[G] += value(r, t, e);
        }
      }
    }
  }

  // Adds all gradients of a tile. row(t, e): of a query; old(r, t, e): the score before the function; dS(r, t, e): the gradient
  // of the changed score.
  template <int ROWS, int TILES, int G = 0, typename RowOf, typename Old, typename Gradient>
  DEVICE void add_all(const KernelParams& p, const Function& function, const typename Function::Column (&columns)[ROWS],
                      const RowOf& row, const Old& old, const Gradient& dS) {
    if constexpr (SCORE_GRADIENTS && G < Function::GRADIENTS) {
      add<G, ROWS, TILES>(
          target_of<G>(p),
          [&](int r, int t, int e) { return function.place(Size<G>{}, row(t, e), columns[r]); },
          [&](int r, int t, int e) {
            return times_weight(dS(r, t, e), function.weight(Size<G>{}, old(r, t, e), row(t, e), columns[r]));
          });
      add_all<ROWS, TILES, G + 1>(p, function, columns, row, old, dS);
    }
  }

  // Adds the sums that are still in registers. At the end, by all lanes of a warp.
  template <int G, typename Target>
  DEVICE void finish(Target* target) {
    const int first = int(shfl(u32(held[G]), 0));
    if (warp_any(held[G] != first)) {
      pass_on<G>(target);
    } else {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) sum[G] += shfl_xor(sum[G], distance);
      if (lane_id() == 0) pass_on<G>(target);
    }
    held[G] = -1;
    sum[G] = 0.0f;
  }
  template <int G = 0>
  DEVICE void finish_all(const KernelParams& p) {
    if constexpr (SCORE_GRADIENTS && G < Function::GRADIENTS) {
      finish<G>(target_of<G>(p));
      finish_all<G + 1>(p);
    }
  }

 private:
  // The gradient of an array; DETERMINISTIC: its exact sums.
  template <int G>
  DEVICE static auto target_of(const KernelParams& p) {
    if constexpr (DETERMINISTIC) {
      return ExactSums<KernelParams>{p}.of(Function::target(p, Size<G>{}));
    } else {
      return Function::target(p, Size<G>{});
    }
  }
  template <int G>
  DEVICE void pass_on(float* target) const {
    if (held[G] >= 0) red_add_f32(target + held[G], sum[G]);
  }
  template <int G>
  DEVICE void pass_on(char* sums) const {
    if (held[G] >= 0) add_exactly(sums + i64(held[G]) * SUM_BYTES, sum[G]);
  }
};

struct NoArrayGradients {
  DEVICE void finish_all(const KernelParams&) const {}
};
using SumsOfArrays = typename Choose<SCORE_GRADIENTS, ArrayGradients, NoArrayGradients>::type;
