// The copy engine without a tensor map: consecutive bytes between global and shared memory, 16-byte aligned and a multiple of
// 16. bulk_commit() (tma.cuh) closes a group of stores and additions; a thread waits for groups.
#pragma once
#include "primitives/tma.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// cp.async.bulk, global -> shared. Its bytes count towards `barrier`, an mbarrier.
DEVICE void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// cp.reduce.async.bulk.add.f32, shared -> global: global[i] += smem[i], each element atomic, in any order. After ordinary stores
// to `smem`, async_proxy_fence() and a barrier come first. The buffer is in use until bulk_wait_read() returns.
DEVICE void bulk_add_f32(float* global, u32 smem, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(smem),
               "r"(bytes)
               : "memory");
}

// fence.proxy.async of global memory: the copy engine sees all stores that this thread sees.
DEVICE void global_proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// cp.async.bulk.wait_group: all of this thread's groups are complete in global memory, not only read.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif  // __CUDACC__
