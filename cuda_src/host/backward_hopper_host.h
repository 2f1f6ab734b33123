// Host twins of the primitives that the backward on Hopper adds: bulk_copy.cuh, opaque.cuh, wgmma_transposed.cuh.
#pragma once
#include "host/hopper_host.h"

namespace cufa_host {

// bulk_copy.cpp
void load_linear(u32 smem, const void* global, u32 bytes, u32 barrier, Site site);
void add_linear(float* global, u32 smem, u32 bytes, Site site);
void await_stores();

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

// ---- bulk_copy.cuh
DEVICE void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, SITE) {
  cufa_host::load_linear(smem, global, bytes, barrier, site);
}
DEVICE void bulk_add_f32(float* global, u32 smem, u32 bytes, SITE) { cufa_host::add_linear(global, smem, bytes, site); }
DEVICE void global_proxy_fence() { cufa_host::fence_proxies(); }
DEVICE void bulk_wait() { cufa_host::await_stores(); }

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

#undef SITE
