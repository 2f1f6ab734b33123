// The argument of forward kernels for e4m3: a number is its scale times e4m3. cufa/problem/float8.py has the shapes of scales.
#pragma once
#include "shared/params.cuh"

struct Float8Params : AttentionParams {
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
};
