// Sums in global memory that threads of any block add to. Additions come in any order and do not race with one another; a load or
// a store of the same memory races with them, unless a semaphore (semaphore.cuh) or another launch orders it.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// red.relaxed.gpu.global.add.f32: *p += v; no old value is returned. Subnormal numbers become zeros.
DEVICE void red_add_f32(float* p, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}

// red.relaxed.gpu.global.add.v4.f32 (sm_90): four consecutive elements, aligned to 16 bytes. Each element is atomic, the vector
// is not.
DEVICE void red_add_f32x4(float* p, float v0, float v1, float v2, float v3) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v0), "f"(v1), "f"(v2), "f"(v3)
               : "memory");
}

// red.relaxed.gpu.global.add.u64: of integers, so that the order of additions does not matter.
DEVICE void red_add_u64(void* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
#endif  // __CUDACC__
