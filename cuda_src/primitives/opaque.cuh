// Values that the compiler must not look through.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/backward_hopper_host.h"
#else

// No instruction: what follows from the result is worked out where it is needed, and not kept in registers over a loop.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
#endif  // __CUDACC__
