// Further parameters of forward kernels with dropout. (Backward kernels: backward/params.cuh.)
#pragma once
#include "shared/score_params.cuh"

struct DroppedParams : AttentionParams {
  const u64* seed;         // (2): the generator's key, and a number whose low 32 bits are used
  u32 dropped;             // how many of 256 weights are dropped
  u32 dropped_low_bits;    // its low 7 bits, in each byte
  u32 dropped_below_half;  // all bits set if `dropped` is less than 128, else 0
  float kept_factor;       // 256 / (256 - dropped)
};

struct ScoredDroppedParams : ScoredParams {
  const u64* seed;
  u32 dropped, dropped_low_bits, dropped_below_half;
  float kept_factor;
};
