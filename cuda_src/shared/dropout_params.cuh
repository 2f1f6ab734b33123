// Further parameters of forward kernels with dropout. (Backward kernels: backward/params.cuh.)
#pragma once
#include "shared/score_params.cuh"

struct DroppedParams : AttentionParams {
  const u64* seed;            // (2): the generator's key, and a number whose low 32 bits are used
  u32 zeros_low, zeros_high;  // where the bits of `dropped`, of 256 weights, are 0: bit k in the highest bit of byte k % 4
  float kept_factor;          // 256 / (256 - dropped)
};

struct ScoredDroppedParams : ScoredParams {
  const u64* seed;
  u32 zeros_low, zeros_high;
  float kept_factor;
};
