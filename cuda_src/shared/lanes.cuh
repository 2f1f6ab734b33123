// Maxima and sums over the four lanes of a quad, and over a warp.
#pragma once
#include "primitives/primitives.cuh"

DEVICE float quad_max(float x) {
  x = fmaxf(x, shfl_xor(x, 1));
  return fmaxf(x, shfl_xor(x, 2));
}

DEVICE float quad_sum(float x) {
  x += shfl_xor(x, 1);
  return x + shfl_xor(x, 2);
}

DEVICE float warp_sum(float x) {
  x = quad_sum(x);
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) x += shfl_xor(x, distance);
  return x;
}
