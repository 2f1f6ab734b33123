// Communication between blocks of one grid through global memory, and between launches.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// atom.inc.acq_rel.gpu: returns the old value. The counter becomes 0 if the old value was `last` or more, else one more: no reset
// between launches. Threads that increment the counter later see the writes of this thread and, through a barrier, of its block.
DEVICE u32 atomic_inc_wrap(u32* counter, u32 last) {
  u32 old;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}

// griddepcontrol.launch_dependents (sm_90): blocks of the next launch, if it is dependent, may become resident.
DEVICE void grid_release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// griddepcontrol.wait (sm_90): the previous launch is complete, and its writes are visible.
DEVICE void grid_await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif  // __CUDACC__
