// A counter in global memory by which blocks of one grid wait for one another: one block adds when its work is done, another
// loads until the count is the one it waits for. A barrier of the block precedes the addition (the work of all threads is done)
// and follows the last load (all threads know). The block waited for must be running, or done: blocks start in ascending order,
// so that a block waits only for blocks of smaller number.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/backward_host.h"
#else

// red.release.gpu.global.add.u32: *counter += v. A thread that loads the new count sees what this thread (and, through a barrier,
// its block) wrote before.
DEVICE void red_release_gpu_add(u32* counter, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(v) : "memory");
}

// ld.acquire.gpu.global.u32
DEVICE u32 ld_acquire_gpu(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// ld.relaxed.gpu.global.u32: for a thread that then reads nothing that other blocks wrote.
DEVICE u32 ld_relaxed_gpu(const u32* counter) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
#endif  // __CUDACC__
