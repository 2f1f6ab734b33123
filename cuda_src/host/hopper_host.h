// Host twins of the primitives of sm_90a: mbarrier.cuh, tma.cuh, wgmma.cuh, register_budget.cuh.
//
// A warp executes its own 16 rows of a product when it waits for the product. Bulk copies land when they are issued, or when no
// warp has anything else to do; bulk stores read shared memory when they are issued, or when they are waited for. Checked mode
// finds missing fences: between proxies (race_detector.h), and of wgmma (warpgroup.h).
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

// deadlock.cpp. Called by all lanes of a warp: waits until `count` registers for each lane are free.
void set_registers(int count, Site site);

// warpgroup.cpp
struct WarpgroupProduct {
  int n;
  bool bfloat16, accumulate, transposed;
  bool a_in_registers;
  u32 a[4];
  const u32* a_registers;  // the address of four consecutive operand registers; null: not known
  u64 a_descriptor, b_descriptor;
  float* d;
  bool e4m3 = false;  // else 16-bit elements
};
void queue_warpgroup_product(const WarpgroupProduct& product, Site site);
void await_warpgroup_products(u32 pending, Site site);

// An operand register of a product: its value, and its address if the argument is an lvalue.
struct RegisterOperand {
  RegisterOperand(const u32& lvalue) : value(lvalue), place(&lvalue) {}
  RegisterOperand(u32&& rvalue) : value(rvalue), place(nullptr) {}
  u32 value;
  const u32* place;
};
// The address of four registers if they are consecutive, else null.
inline const u32* consecutive(RegisterOperand a0, RegisterOperand a1, RegisterOperand a2, RegisterOperand a3) {
  const u32* first = a0.place;
  return first && a1.place == first + 1 && a2.place == first + 2 && a3.place == first + 3 ? first : nullptr;
}

}  // namespace cufa_host

// ---- mbarrier.cuh: mbarrier.cpp, bulk_copy.cpp
void mbarrier_init(u32 barrier, u32 arrivals, SITE);
void mbarrier_init_fence();
void async_proxy_fence();
void mbarrier_arrive(u32 barrier, SITE);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, SITE);
void mbarrier_wait(u32 barrier, u32 parity, SITE);
void mbarrier_wait_cluster(u32 barrier, u32 parity, SITE);

// ---- register_budget.cuh
template <int COUNT>
DEVICE void registers_release_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}
template <int COUNT>
DEVICE void registers_raise_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}

// ---- tma.cuh: bulk_copy.cpp
void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, SITE);
void tma_store_4d(const TensorMap* map, u32 smem, int c0, int c1, int c2, int c3, SITE);
void bulk_commit();
void bulk_wait_read();

// ---- wgmma.cuh: warpgroup.cpp
void wgmma_fence();
void wgmma_commit();
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
    const u32* const place = cufa_host::consecutive(a0, a1, a2, a3);
    cufa_host::queue_warpgroup_product(
        {N, BF16, ACCUMULATE, TRANSPOSED, true, {a0.value, a1.value, a2.value, a3.value}, place, 0, b, d}, site);
  }
};

// ---- wgmma_e4m3.cuh
template <int N>
struct WgmmaE4m3 {
  using Operand = cufa_host::RegisterOperand;
  template <bool ACCUMULATE>
  static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, SITE) {
    cufa_host::queue_warpgroup_product({N, false, ACCUMULATE, false, false, {}, nullptr, a, b, d, true}, site);
  }
  template <bool ACCUMULATE>
  static DEVICE void rs(float (&d)[N / 2], Operand a0, Operand a1, Operand a2, Operand a3, u64 b, SITE) {
    const u32* const place = cufa_host::consecutive(a0, a1, a2, a3);
    cufa_host::queue_warpgroup_product(
        {N, false, ACCUMULATE, false, true, {a0.value, a1.value, a2.value, a3.value}, place, 0, b, d, true}, site);
  }
};
