// Exchange between blocks of a cluster in every tile: copies by the copy engine, and arrivals once the copy has been read.
#pragma once
#include "primitives/cluster.cuh"

#ifdef __CUDACC__
// cp.async.bulk.shared::cluster.shared::cta: copies `bytes` from this block's `smem` to a cluster_address(), asynchronously; all
// 16-byte aligned. The bytes count towards `barrier`, an mbarrier of the target block. After ordinary stores to `smem`,
// async_proxy_fence() and a barrier come first.
DEVICE void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
               "r"(smem), "r"(bytes), "r"(barrier)
               : "memory");
}

// mbarrier.arrive.relaxed.cluster, at an mbarrier of another block (a cluster_address()). It releases none of this thread's
// writes; it only orders the thread's completed reads, whose source may then be overwritten. A release to the cluster is a fence
// (MEMBAR.ALL.GPU) that waits for all of the thread's additions to device memory in flight: once per tile, too slow.
DEVICE void mbarrier_arrive_cluster_relaxed(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#endif  // __CUDACC__
