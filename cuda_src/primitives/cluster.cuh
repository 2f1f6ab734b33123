// Thread block clusters (sm_90): blocks that run at the same time, on neighbouring SMs, and write to each other's shared
// memory. The launch sets the number of blocks of a cluster.
#pragma once
#include "primitives/mbarrier.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// %cluster_ctarank: index of this block in its cluster.
DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster: every thread of every block of the cluster arrives, then waits. Plain `arrive` releases this thread's earlier
// writes to the threads that wait; `arrive_relaxed` releases nothing.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// mapa.shared::cluster: the address in block `rank` that corresponds to `smem`, a shared address of this block. The other block
// must have begun (known after a barrier of the cluster), and must not have ended.
DEVICE u32 cluster_address(u32 smem, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

// st.shared::cluster, to a cluster_address(). Kernels send by st.async or the copy engine; tests of cluster barriers use these.
DEVICE void st_cluster_vec2(u32 address, vec2 v) {
  asm volatile("st.shared::cluster.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void st_cluster_vec4(u32 address, vec4 v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// st.async.shared::cluster, to a cluster_address(): asynchronous. Its bytes count towards `barrier`, an mbarrier of the same
// block.
DEVICE void st_async_vec2(u32 address, vec2 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(address), "r"(v.x),
               "r"(v.y), "r"(barrier)
               : "memory");
}
DEVICE void st_async_vec4(u32 address, vec4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}

// mbarrier_wait() with .acquire.cluster: the thread also sees what other blocks of the cluster sent (st.async).
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @done bra READY; "
      "bra WAIT; READY:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif  // __CUDACC__
