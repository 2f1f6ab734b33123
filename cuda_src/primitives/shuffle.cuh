// Exchange among the 32 lanes of a warp; all lanes take part.
#pragma once
#include "primitives/types.cuh"

DEVICE float shfl_xor(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl_xor(u32 v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
DEVICE u32 shfl(u32 v, int source_lane) { return __shfl_sync(0xffffffffu, v, source_lane); }
DEVICE bool warp_any(bool v) { return __any_sync(0xffffffffu, v); }

// redux.sync.max.u32: the maximum over the warp, in every lane.
DEVICE u32 redux_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
