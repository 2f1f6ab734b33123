// What blocks of one grid tell each other through global memory.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/decode_host.h"
#else

// atom.inc.acq_rel.gpu: the old value; the counter becomes 0 if that was `last` (or more), else one more, so that it is
// ready for the next launch by itself. What this thread (and, by a barrier before, its block) wrote is seen by those who
// count up the same counter later.
DEVICE u32 atomic_inc_wrap(u32* counter, u32 last) {
  u32 old;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}
#endif  // __CUDACC__
