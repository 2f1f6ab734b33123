// Host twins of the primitives that the backward on Hopper adds: bulk_copy.cuh, opaque.cuh, wgmma_transposed.cuh.
#pragma once
#include "host/hopper_host.h"

// ---- bulk_copy.cuh: bulk_copy.cpp
void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, SITE);
void bulk_add_f32(float* global, u32 smem, u32 bytes, SITE);
void global_proxy_fence();
void bulk_wait();

// ---- opaque.cuh
DEVICE u32 opaque(u32 x) { return x; }

// ---- wgmma_transposed.cuh
template <int N, bool BF16>
struct WgmmaTransposedB {
  template <bool ACCUMULATES>
  static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, SITE) {
    cufa_host::queue_warpgroup_product({N, BF16, ACCUMULATES, true, false, {}, nullptr, a, b, d}, site);
  }
};
