// What blocks of a cluster hand to one another in every tile: bytes by the copy engine, and word that they have been read.
#pragma once
#include "primitives/cluster.cuh"

#ifdef __CUDACC__
// cp.async.bulk.shared::cluster.shared::cta: `bytes` from this block's `smem` to a cluster_address(), on their way when this
// returns; all 16-byte aligned. They count towards `barrier`, an mbarrier of the block that they go to. Ordinary stores to `smem`
// need async_proxy_fence() and a barrier before.
DEVICE void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
               "r"(smem), "r"(bytes), "r"(barrier)
               : "memory");
}

// mbarrier.arrive.relaxed.cluster, at an mbarrier of another block (a cluster_address()). It releases nothing that this thread
// wrote: it says that what the thread has read, and waited for, may be overwritten. A release to the cluster is a fence
// (MEMBAR.ALL.GPU) that waits for all additions to device memory that the thread has in flight: once a tile, it made a kernel 0.8
// times as fast.
DEVICE void mbarrier_arrive_cluster_relaxed(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#endif  // __CUDACC__
