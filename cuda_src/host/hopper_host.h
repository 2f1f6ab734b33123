// Host twins of the primitives of sm_90a: mbarrier.cuh, tma.cuh, wgmma.cuh, register_budget.cuh.
//
// Products are executed when they are waited for, each warp its own 16 rows; bulk copies land when issued or when
// every warp has nothing else to do, stores read shared memory when issued or when they are waited for. Missing fences are
// found in checked mode: between proxies (race_detector.h), and of wgmma (wgmma_registers.h).
#pragma once
#include "host/primitives_host.h"

// What the driver encodes in an opaque CUtensorMap, in the clear: cufa/run/emulate/memory.py writes it. A box is copied
// with the 128-byte swizzle.
struct TensorMap {
  const unsigned char* address;
  u32 item_bytes;
  u64 sizes[4];    // elements, innermost axis first
  u64 strides[4];  // bytes
  u32 box[4];      // elements
};

namespace cufa_host {

// mbarrier.cpp
void mbarrier_init(u32 barrier, u32 arrivals, Site site);
void mbarrier_arrive(u32 barrier, u32 bytes, Site site);
void mbarrier_wait(u32 barrier, u32 parity, bool from_cluster, Site site);
void mbarrier_init_fence();

// bulk_copy.cpp
void load_box(u32 smem, const TensorMap* map, u32 barrier, const int (&first)[4], Site site);
void store_box(const TensorMap* map, u32 smem, const int (&first)[4], Site site);
void commit_stores();
void await_stores_read();
void fence_proxies();

// warpgroup.cpp
struct WarpgroupProduct {
  int n;
  bool bfloat16, accumulate, transposed;
  bool a_in_registers;
  u32 a[4];
  const u32* a_registers;  // where they are, four in a row; null: not known
  u64 a_descriptor, b_descriptor;
  float* d;
};
// A register that a product takes its operand from: where it is, if it is more than a value.
struct RegisterOperand {
  RegisterOperand(const u32& lvalue) : value(lvalue), place(&lvalue) {}
  RegisterOperand(u32&& rvalue) : value(rvalue), place(nullptr) {}
  u32 value;
  const u32* place;
};
inline const u32* four_in_a_row(RegisterOperand a0, RegisterOperand a1, RegisterOperand a2, RegisterOperand a3) {
  const u32* first = a0.place;
  return first && a1.place == first + 1 && a2.place == first + 2 && a3.place == first + 3 ? first : nullptr;
}
void queue_warpgroup_product(const WarpgroupProduct& product, Site site);
void commit_warpgroup_products();
void await_warpgroup_products(u32 pending, Site site);

// register_budget.cpp
// By all lanes of a warp: so many for each; waits until there are enough.
void set_registers(int count, Site site);

// wgmma_registers.cpp
void fence_warpgroup();

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

// ---- mbarrier.cuh
DEVICE void mbarrier_init(u32 barrier, u32 arrivals, SITE) { cufa_host::mbarrier_init(barrier, arrivals, site); }
DEVICE void mbarrier_init_fence() { cufa_host::mbarrier_init_fence(); }
DEVICE void async_proxy_fence() { cufa_host::fence_proxies(); }
DEVICE void mbarrier_arrive(u32 barrier, SITE) { cufa_host::mbarrier_arrive(barrier, 0, site); }
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, SITE) {
  cufa_host::mbarrier_arrive(barrier, bytes, site);
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity, SITE) { cufa_host::mbarrier_wait(barrier, parity, false, site); }
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity, SITE) {
  cufa_host::mbarrier_wait(barrier, parity, true, site);
}

// ---- register_budget.cuh
template <int COUNT>
DEVICE void registers_release_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}
template <int COUNT>
DEVICE void registers_raise_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}

// ---- tma.cuh
DEVICE void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, SITE) {
  cufa_host::load_box(smem, map, barrier, {c0, c1, c2, c3}, site);
}
DEVICE void tma_store_4d(const TensorMap* map, u32 smem, int c0, int c1, int c2, int c3, SITE) {
  cufa_host::store_box(map, smem, {c0, c1, c2, c3}, site);
}
DEVICE void bulk_commit() { cufa_host::commit_stores(); }
DEVICE void bulk_wait_read() { cufa_host::await_stores_read(); }

// ---- wgmma.cuh
DEVICE void wgmma_fence() { cufa_host::fence_warpgroup(); }
DEVICE void wgmma_commit() { cufa_host::commit_warpgroup_products(); }
template <int PENDING>
DEVICE void wgmma_wait(SITE) {
  cufa_host::await_warpgroup_products(PENDING, site);
}
template <int COUNT>
DEVICE void wgmma_registers(float (&)[COUNT]) {}
template <int COUNT>
DEVICE void wgmma_registers(u32 (&)[COUNT]) {}
DEVICE void pair_registers(float, float, bool) {}

template <int N, bool BF16>
struct Wgmma {
  using Operand = cufa_host::RegisterOperand;
  template <bool ACCUMULATE>
  static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, SITE) {
    cufa_host::queue_warpgroup_product({N, BF16, ACCUMULATE, false, false, {}, nullptr, a, b, d}, site);
  }
  template <bool ACCUMULATE, bool TRANSPOSED>
  static DEVICE void rs(float (&d)[N / 2], Operand a0, Operand a1, Operand a2, Operand a3, u64 b, SITE) {
    const u32* const place = cufa_host::four_in_a_row(a0, a1, a2, a3);
    cufa_host::queue_warpgroup_product(
        {N, BF16, ACCUMULATE, TRANSPOSED, true, {a0.value, a1.value, a2.value, a3.value}, place, 0, b, d}, site);
  }
};

#undef SITE
