// Maxima in global memory that threads of any block add to, as reduction.cuh's sums.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// red.relaxed.gpu.global.max.u32: *p = max(*p, v). The bits of floats from 0 up are ordered as the floats are.
DEVICE void red_max_u32(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
#endif  // __CUDACC__
