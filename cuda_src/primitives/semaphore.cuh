// A counter in global memory by which blocks of one grid wait for one another: one block adds when its work is done,
// another loads until the count is what it waits for. A barrier of the block goes before the addition, so that the work of
// all its threads is done, and after the last load, so that all its threads know. The block waited for must be running, or
// done: blocks begin in ascending order, so a block waits for those of smaller number only.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/backward_host.h"
#else

// red.release.gpu.global.add.u32: *counter += v. What this thread wrote before (and, by a barrier before, its block) is seen
// by those who load the new count.
DEVICE void red_release_gpu_add(u32* counter, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(v) : "memory");
}

// ld.acquire.gpu.global.u32
DEVICE u32 ld_acquire_gpu(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// ld.relaxed.gpu.global.u32: for those who then read nothing that the others wrote.
DEVICE u32 ld_relaxed_gpu(const u32* counter) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
#endif  // __CUDACC__
