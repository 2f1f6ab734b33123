// mbarrier: a barrier object in shared memory (8 bytes, 8-byte aligned) that counts arrivals and bytes of asynchronous copies, in
// phases. A phase completes with its last arrival and its last announced byte; the next phase begins at once.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// mbarrier.init: `arrivals` arrivals complete a phase.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: initialised barriers are visible to the copy engine, and to the cluster. A barrier of the block, or of
// the cluster, must follow.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive
DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrive, and announce `bytes` that asynchronous copies will bring in this phase.
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity in a loop: returns when the phase of this parity (0 for the first) is complete. The thread then sees
// the writes of this block's threads before their arrivals, and the bytes of its copies.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra READY; bra WAIT; READY:}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// fence.proxy.async: after the next barrier, wgmma and TMA see this thread's ordinary stores to shared memory.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif  // __CUDACC__
