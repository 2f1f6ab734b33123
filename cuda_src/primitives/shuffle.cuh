// Exchange among the 32 lanes of a warp; all lanes take part.
#pragma once
#include "primitives/types.cuh"

DEVICE float shfl_xor(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl_xor(u32 v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl(u32 v, int source_lane) { return __shfl_sync(0xffffffffu, v, source_lane); }
DEVICE bool warp_any(bool v) { return __any_sync(0xffffffffu, v); }

// elect.sync: true in one lane. In code that it guards ptxas knows that one lane is active, and keeps operands of TMA in uniform
// registers; after `lane == 0` it loops over the lanes that may be active.
DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// redux.sync.max.u32: the maximum over the warp, in every lane.
DEVICE u32 redux_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
