// Asynchronous copies from global to shared memory (sm_80): the data bypasses registers.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// cp.async.cg, 16 bytes, L1 bypassed. With `valid` false nothing is read and zeros are written.
DEVICE void cp_async_16(u32 smem, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}

// cp.async.ca, 4 or 8 bytes, for rows that are not 16-byte aligned.
template <int BYTES>
DEVICE void cp_async_small(u32 smem, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  const int bytes = valid ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem), "l"(global), "n"(BYTES), "r"(bytes) : "memory");
}

// cp.async.commit_group: the copies issued since the last commit become one group.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: this thread's groups have landed, all but the `PENDING` youngest.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif  // __CUDACC__
