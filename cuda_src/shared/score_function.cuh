// The caller's score function (cufa.score), printed before the kernel as struct ScoreFunction by cufa/build/score_text.py. It
// is given products of queries and keys, and scales them. Soft cap, ALiBi and mask come after it; their parameters are made
// for a scale of 1.
#pragma once
#include "shared/element.cuh"
#include "shared/fragment_view.cuh"
#include "shared/lengths.cuh"
#include "shared/score_params.cuh"
#include "shared/softcap.cuh"

#ifdef CUFA_SCORE
static_assert(SCORE, "a score function is printed for builds with SCORE only");
#else
static_assert(!SCORE, "SCORE needs the text of a score function before the kernel");
// Without SCORE: an empty function, so that the names below resolve. Nothing of it is executed.
template <typename Params>
struct ScoreFunction {
  static constexpr bool HAS_SLOPE = false, WEIGHTS_READ_SCORES = false, IS_LIGHT = true;
  static constexpr bool HAS_TANH = false, TANH_OF_PRODUCT = false;
  static constexpr int GRADIENTS = 0;
  struct Row {};
  struct Column {};
  template <typename OfKernel>
  DEVICE ScoreFunction(const OfKernel&, int, int, int) {}
  DEVICE float unit() const { return 1.0f; }
  DEVICE Row row(int, float) const { return {}; }
  DEVICE Column column(int, float) const { return {}; }
  template <bool SMALL>
  DEVICE float value(float s, const Row&, const Column&) const { return s; }
  template <bool SMALL>
  DEVICE float slope(float, const Row&, const Column&) const { return 1.0f; }
  DEVICE float greatest(float, const Row&, const Column&) const { return 0.0f; }
  template <int G>
  static DEVICE float* target(const Params&, Size<G>) { return nullptr; }
  template <int G>
  DEVICE int place(Size<G>, const Row&, const Column&) const { return 0; }
  template <int G>
  DEVICE float weight(Size<G>, float, const Row&, const Column&) const { return 0.0f; }
};
#endif

// f(score, row, column) for the scores of queries (rows of the view) and keys. `row` and `key` are the lane's first.
template <typename Params, typename View, typename F>
DEVICE void for_each_score(View S, const ScoreFunction<Params>& function, int row, int key, F f) {
  using Function = ScoreFunction<Params>;
  const float row_float = float(row), key_float = float(key);
  typename Function::Row rows[View::ROWS];
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) rows[r] = function.row(row + 8 * r, row_float + float(8 * r));
#pragma unroll
  for (int n = 0; n < View::TILES; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const auto column = function.column(key + 8 * n + e, key_float + float(8 * n + e));
#pragma unroll
      for (int r = 0; r < View::ROWS; ++r) f(S.at(r, n, e), rows[r], column);
    }
  }
}

// A hyperbolic tangent costs less if all arguments of a warp are near 0, which a first pass finds out. With ALONE, the rows of a
// warp do not decide on each other's bits.
template <bool ALONE = false, typename Params, typename View>
DEVICE void apply_function(View S, const ScoreFunction<Params>& function, int row, int key) {
  if constexpr (ScoreFunction<Params>::HAS_TANH && !ALONE) {
    float greatest = 0.0f;
    if constexpr (ScoreFunction<Params>::TANH_OF_PRODUCT) {
      greatest = greatest_magnitude(S);
    } else {
      for_each_score(S, function, row, key, [&](float x, const auto& r, const auto& c) {
        greatest = fmaxf(greatest, function.greatest(x, r, c));
      });
    }
    if (!warp_any(!is_near_0<4>(greatest, function.unit()))) {
      for_each_score(S, function, row, key, [&](float& x, const auto& r, const auto& c) {
        x = function.template value<true>(x, r, c);
      });
      return;
    }
  }
  for_each_score(S, function, row, key, [&](float& x, const auto& r, const auto& c) {
    x = function.template value<false>(x, r, c);
  });
}
