// Values that the compiler cannot see through.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// No instruction. Values derived from the result are recomputed where they are used, not kept in registers over a loop.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// No instruction. x is computed before this point, not where it is used behind a branch.
DEVICE void computed_here(u64 x) { asm volatile("" ::"l"(x)); }
#endif  // __CUDACC__
