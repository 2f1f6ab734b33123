// What the parameters of a forward kernel have besides under dropout. (Of backward kernels: backward/params.cuh.)
#pragma once
#include "shared/score_params.cuh"

struct DroppedParams : AttentionParams {
  const u64* seed;         // (2): the key of the generator, and a number of which the low 32 bits count
  u32 dropped;             // of 256 weights, as many are dropped
  u32 dropped_low_bits;    // its low 7 bits, in each byte
  u32 dropped_below_half;  // all bits, if it is less than 128
  float kept_factor;       // 256 / (256 - dropped)
};

struct ScoredDroppedParams : ScoredParams {
  const u64* seed;
  u32 dropped, dropped_low_bits, dropped_below_half;
  float kept_factor;
};
