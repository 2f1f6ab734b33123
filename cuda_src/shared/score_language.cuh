// Functions that a printed score function calls (cufa/build/score_text.py). Integers divide as in NumPy.
#pragma once
#include "primitives/primitives.cuh"
#include "shared/element.cuh"
#include "shared/softcap.cuh"

// factor * tanh(unit * x). SMALL: is_near_0<4>(|x|, unit), without exponential and reciprocal.
template <bool SMALL>
DEVICE float score_tanh(float x, float unit = 1.0f, float factor = 1.0f) {
  if constexpr (SMALL) return CapNear0<4>(unit, factor)(x);
  return tanh_of(x * (2 * LOG2_E * unit), factor);
}
DEVICE float score_exp2(float x) { return ex2(x); }
DEVICE float score_exp(float x) { return ex2(x * LOG2_E); }
DEVICE float score_expm1(float x) { return score_exp(x) - 1.0f; }
DEVICE float score_log2(float x) { return lg2(x); }
DEVICE float score_log(float x) { return lg2(x) * LN_2; }
DEVICE float score_log1p(float x) { return score_log(1.0f + x); }
DEVICE float score_sqrt(float x) { return sqrtf(x); }
DEVICE float score_sin(float x) { return sinf(x); }
DEVICE float score_cos(float x) { return cosf(x); }
DEVICE float score_floor(float x) { return floorf(x); }
DEVICE float score_ceil(float x) { return ceilf(x); }
DEVICE float score_pow(float x, float y) { return powf(x, y); }
DEVICE float score_div(float x, float y) { return x * rcp(y); }
DEVICE int score_abs(int x) { return x < 0 ? -x : x; }
DEVICE int score_floordiv(int x, int y) { return x / y - (x % y != 0 && (x % y < 0) != (y < 0)); }
DEVICE int score_mod(int x, int y) { return x - score_floordiv(x, y) * y; }
