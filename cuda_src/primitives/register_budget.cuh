// setmaxnreg (sm_90a): warpgroups of one block trade registers. All warps of the warpgroup execute it. The sum over the block
// must stay within what the launch allocated (registers at launch x threads), not the SM's 65,536: asking for more hangs.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/hopper_host.h"
#else

template <int COUNT>
DEVICE void registers_release_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_raise_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif  // __CUDACC__
