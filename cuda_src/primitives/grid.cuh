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

// griddepcontrol.launch_dependents (sm_90): the blocks of the next launch, if it allows that, may become resident.
DEVICE void grid_release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// griddepcontrol.wait (sm_90): the launch before is complete, and what it wrote is seen.
DEVICE void grid_await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif  // __CUDACC__
