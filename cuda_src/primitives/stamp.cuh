// What an inside trace is stamped with (shared/phases.cuh).
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/stamp_host.h"
#else

// %clock64: cycles of this SM. No other SM's are comparable with them, and they run at the clock of the moment.
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

// st.global.v2.b32 under a predicate: no branch, which products in flight would not bear.
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
