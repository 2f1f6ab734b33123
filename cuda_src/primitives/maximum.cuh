// Maxima in global memory that threads of any block raise, under the rules of reduction.cuh's sums.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// red.relaxed.gpu.global.max.u32: *p = max(*p, v). Non-negative floats have the order of their bits.
DEVICE void red_max_u32(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
#endif  // __CUDACC__
