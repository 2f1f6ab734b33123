// What blocks of one grid tell each other through global memory.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/decode_host.h"
#else

// fence.acq_rel.gpu: this thread's accesses before it are ordered before those after it, for the whole GPU.
DEVICE void fence_gpu() { __threadfence(); }

// atom.inc: the old value, and the counter becomes 0 if that was `last` (or more), else one more: it is ready for the
// next launch by itself.
DEVICE u32 atomic_inc_wrap(u32* counter, u32 last) { return atomicInc(counter, last); }
#endif  // __CUDACC__
