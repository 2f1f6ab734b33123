// The argument of forward kernels for e4m3: an element is scale * e4m3. Shapes of scales: cufa/problem/float8.py.
#pragma once
#include "shared/params.cuh"

struct Float8Params : AttentionParams {
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
};
