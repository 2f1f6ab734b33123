// A counter in global memory by which blocks of one grid wait for one another: one block adds when its work is done, another
// block loads until the count is reached. A barrier of the block comes before the addition (all threads are done) and after the
// last load (all threads know). Blocks start in ascending order, so a block may wait only for blocks of smaller index.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// red.release.gpu.global.add.u32: *counter += v. A thread that loads the new count sees the earlier writes of this thread and,
// through a barrier, of its block.
DEVICE void red_release_gpu_add(u32* counter, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(v) : "memory");
}

// ld.acquire.gpu.global.u32
DEVICE u32 ld_acquire_gpu(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
#endif  // __CUDACC__
