// TMA: the copy engine moves boxes of a tensor between global and shared memory; one thread requests a whole tile.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// CUtensorMap, encoded by the driver on the host: address, sizes, strides, box, swizzle. A __grid_constant__ kernel argument.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// cp.async.bulk.tensor.4d, global -> shared: the box at element coordinates c0 ... c3 (innermost first). Elements outside of the
// tensor arrive as zeros. Its bytes (the whole box's) count towards `barrier`.
DEVICE void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// cp.async.bulk.tensor.4d, shared -> global: elements outside of the tensor are not written. After ordinary stores to `smem`,
// async_proxy_fence() and a barrier come first. The buffer is in use until bulk_wait_read() returns.
DEVICE void tma_store_4d(const TensorMap* map, u32 smem, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(smem),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// cp.async.bulk.commit_group: the stores that this thread issued since the last commit become one group.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: all of this thread's groups have read their shared memory.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#endif  // __CUDACC__
