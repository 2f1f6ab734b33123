// Clocks and stores of an inside trace (shared/phases.cuh).
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// %clock64: cycles of this SM at its current clock rate; not comparable between SMs.
DEVICE u64 sm_clock() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

// %clock: the low half, in one register.
DEVICE u32 sm_clock_low() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}

// st.global.v2.b32 under a predicate: a branch would serialize products in flight.
DEVICE void st_global_if(bool is_on, void* p, vec2 v) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.u32 on, %3, 0;\n"
      "@on st.global.v2.b32 [%0], {%1,%2};\n"
      "}\n" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(u32(is_on))
      : "memory");
}
#endif  // __CUDACC__
