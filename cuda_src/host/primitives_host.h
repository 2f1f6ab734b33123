// Host twins of primitives/*.cuh: the same names and arguments, for a kernel that g++ compiles and a CPU executes, every CUDA
// thread a fiber. Most twins are functions of the runtime. A test compares the two sets of names; golden vectors recorded on a
// GPU compare results.
//
// A warp-collective twin parks the calling lane; the last lane to arrive executes for the warp. Products (mma) are queued, and
// executed at the warp's next collective; mma_fence() is the cheapest. A warp executes its 16 rows of a wgmma when it waits for
// the product. Bulk copies land when they are issued, or when no warp has anything else to do; bulk stores read shared memory
// when they are issued, or when they are waited for. Checked mode finds missing fences: between proxies (race_detector.h), and
// of wgmma (warpgroup.h).
//
// The twins cannot tell how fast a kernel is, how many registers it takes, whether the operand string of an asm statement is
// right, or how warps interleave inside one instruction.
#pragma once
#include "primitives/types.cuh"

// The readable form of the driver's opaque CUtensorMap, written by cufa/run/emulate/memory.py. A box is copied with the
// 128-byte swizzle.
struct TensorMap {
  const unsigned char* address;
  u32 item_bytes;
  u64 sizes[4];    // elements, innermost axis first
  u64 strides[4];  // bytes
  u32 box[4];      // elements
};

namespace cufa_host {
// Formats of tensor-core operands.
enum class Format { f16, bf16, tf32, e4m3 };
}  // namespace cufa_host

// ---- barrier.cuh: barriers.cpp
void bar_sync(int id, int num_threads, SITE);
void bar_arrive(int id, int num_threads, SITE);
void block_sync(SITE);
void warp_sync(SITE);

// ---- convert.cuh: arithmetic.cpp
DEVICE u32 float_as_u32(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
DEVICE float u32_as_float(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
u32 cvt_f16x2(float lo, float hi);
u32 cvt_f16x2_satfinite(float lo, float hi);
u32 cvt_bf16x2(float lo, float hi);
float cvt_f32_f16(u16 x);
DEVICE float cvt_f32_bf16(u16 x) { return u32_as_float(u32(x) << 16); }
u32 cvt_tf32(float x);

// ---- cp_async.cuh: async_copy.cpp
namespace cufa_host {
void copy_async(u32 smem, const void* global, u32 bytes, bool valid, Site site);
void await_copies(u32 pending);
}  // namespace cufa_host
void cp_async_16(u32 smem, const void* global, bool valid, SITE);
template <int BYTES>
DEVICE void cp_async_small(u32 smem, const void* global, bool valid, SITE) {
  static_assert(BYTES == 4 || BYTES == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  cufa_host::copy_async(smem, global, BYTES, valid, site);
}
void cp_async_commit();
template <int PENDING>
DEVICE void cp_async_wait() {
  cufa_host::await_copies(PENDING);
}

// ---- ldmatrix.cuh: collectives.cpp
void ldmatrix_x4(u32 (&r)[4], u32 smem, SITE);
void ldmatrix_x2(u32 (&r)[2], u32 smem, SITE);
void ldmatrix_x4_trans(u32 (&r)[4], u32 smem, SITE);
void ldmatrix_x2_trans(u32 (&r)[2], u32 smem, SITE);

// ---- math.cuh: arithmetic.cpp
#define NEG_INF u32_as_float(0xff800000u)
float ex2(float x);
float lg2(float x);
float rcp(float x);
float fma_sat(float x, float y, float z);

// ---- memory.cuh: memory.cpp, which translates every address and, in checked mode, tests the access before making it
namespace cufa_host {
void load_global(void* value, const void* global, u32 bytes, Site site);
void store_global(void* global, const void* value, u32 bytes, Site site);
}  // namespace cufa_host
u32 smem_address(const void* p);
void st_shared_u16(u32 smem, u16 v, SITE);
void st_shared_u32(u32 smem, u32 v, SITE);
void st_shared_f32(u32 smem, float v, SITE);
void st_shared_vec2(u32 smem, vec2 v, SITE);
void st_shared_vec4(u32 smem, vec4 v, SITE);
u16 ld_shared_u16(u32 smem, SITE);
u32 ld_shared_u32(u32 smem, SITE);
float ld_shared_f32(u32 smem, SITE);
vec2 ld_shared_vec2(u32 smem, SITE);
vec4 ld_shared_vec4(u32 smem, SITE);
template <typename T>
DEVICE T ld_global(const void* p, SITE) {
  T value;
  cufa_host::load_global(&value, p, sizeof(T), site);
  return value;
}
template <typename T>
DEVICE void st_global(void* p, T v, SITE) {
  cufa_host::store_global(p, &v, sizeof(T), site);
}

// ---- mma.cuh: tensor_core.cpp
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE);
void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE);
void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE);
void mma_fence(SITE);

// ---- shuffle.cuh: collectives.cpp
float shfl_xor(float v, int lane_mask, SITE);
u32 shfl_xor(u32 v, int lane_mask, SITE);
u32 redux_max(u32 v, SITE);
u32 shfl(u32 v, int source_lane, SITE);
bool warp_any(bool v, SITE);
bool elect_one(SITE);

// ---- special_registers.cuh: arithmetic.cpp, memory.cpp
u64 global_timer();
DEVICE int lane_id() { return cufa_host::context->thread_index.x % 32; }
DEVICE int thread_id() { return cufa_host::context->thread_index.x; }
u32 sm_id();
u32 atomic_add(u32* p, u32 v, SITE);

// ---- bulk_copy.cuh: bulk_copy.cpp
void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, SITE);
void bulk_add_f32(float* global, u32 smem, u32 bytes, SITE);
void global_proxy_fence();
void bulk_wait();

// ---- cluster.cuh: cluster_memory.cpp, cluster_barrier.cpp, mbarrier.cpp
u32 cluster_rank();
void cluster_arrive(SITE);
void cluster_arrive_relaxed(SITE);
void cluster_wait(SITE);
u32 cluster_address(u32 smem, u32 rank, SITE);
void st_cluster_vec2(u32 address, vec2 v, SITE);
void st_cluster_vec4(u32 address, vec4 v, SITE);
void st_async_vec2(u32 address, vec2 v, u32 barrier, SITE);
void st_async_vec4(u32 address, vec4 v, u32 barrier, SITE);
void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier, SITE);
void mbarrier_arrive_cluster_relaxed(u32 barrier, SITE);

// ---- float8.cuh: arithmetic.cpp, tensor_core.cpp
u32 cvt_f16x2_e4m3x2(u16 x);
u32 cvt_e4m3x2(float lo, float hi);
void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE);
u32 byte_permute(u32 lo, u32 hi, u32 selector);

// ---- grid.cuh: memory.cpp. Launches run one after another here; checked mode finds what a launch touches too early.
u32 atomic_inc_wrap(u32* counter, u32 last, SITE);
void grid_release_next();
void grid_await_previous();

// ---- mbarrier.cuh: mbarrier.cpp, bulk_copy.cpp
void mbarrier_init(u32 barrier, u32 arrivals, SITE);
void mbarrier_init_fence();
void async_proxy_fence();
void mbarrier_arrive(u32 barrier, SITE);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, SITE);
void mbarrier_wait(u32 barrier, u32 parity, SITE);
void mbarrier_wait_cluster(u32 barrier, u32 parity, SITE);

// ---- opaque.cuh
DEVICE u32 opaque(u32 x) { return x; }
DEVICE void computed_here(u64) {}

// ---- reduction.cuh, maximum.cuh, semaphore.cuh: reductions.cpp
void red_add_f32(float* p, float v, SITE);
void red_add_f32x4(float* p, float v0, float v1, float v2, float v3, SITE);
void red_add_u64(void* p, u64 v, SITE);
void red_max_u32(u32* p, u32 v, SITE);
void red_release_gpu_add(u32* counter, u32 v, SITE);
u32 ld_acquire_gpu(const u32* counter, SITE);

// ---- register_budget.cuh: deadlock.cpp. Called by all lanes of a warp: waits until `count` registers for each lane are free.
namespace cufa_host {
void set_registers(int count, Site site);
}  // namespace cufa_host
template <int COUNT>
DEVICE void registers_release_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}
template <int COUNT>
DEVICE void registers_raise_to(SITE) {
  cufa_host::set_registers(COUNT, site);
}

// ---- stamp.cuh: arithmetic.cpp. The clock counts what this worker has executed: products, exponentials, copies, shuffles,
// barriers and readings of the clock. It orders events and does not measure time.
u64 sm_clock();
u32 sm_clock_low();
DEVICE void st_global_if(bool is_on, void* p, vec2 v, SITE) {
  if (is_on) cufa_host::store_global(p, &v, sizeof(v), site);
}

// ---- stmatrix.cuh: collectives.cpp
void stmatrix_x4(u32 smem, const u32 (&r)[4], SITE);
void stmatrix_x4_trans(u32 smem, const u32 (&r)[4], SITE);

// ---- tma.cuh: bulk_copy.cpp
void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, SITE);
void tma_store_4d(const TensorMap* map, u32 smem, int c0, int c1, int c2, int c3, SITE);
void bulk_commit();
void bulk_wait_read();

// ---- wgmma.cuh, wgmma_transposed.cuh, wgmma_e4m3.cuh: warpgroup.cpp
namespace cufa_host {
struct WarpgroupProduct {
  int n;
  Format format;
  bool accumulate, transposed;
  bool a_in_registers;
  u32 a[4];
  const u32* a_registers;  // the address of four consecutive operand registers; null: not known
  u64 a_descriptor, b_descriptor;
  float* d;
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

template <int N, Format FORMAT>
struct WgmmaTwin {
  using Operand = RegisterOperand;
  template <bool ACCUMULATE, bool TRANSPOSED = false>
  static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, SITE) {
    queue_warpgroup_product({N, FORMAT, ACCUMULATE, TRANSPOSED, false, {}, nullptr, a, b, d}, site);
  }
  template <bool ACCUMULATE, bool TRANSPOSED = false>
  static DEVICE void rs(float (&d)[N / 2], Operand a0, Operand a1, Operand a2, Operand a3, u64 b, SITE) {
    const u32* const place = consecutive(a0, a1, a2, a3);
    queue_warpgroup_product(
        {N, FORMAT, ACCUMULATE, TRANSPOSED, true, {a0.value, a1.value, a2.value, a3.value}, place, 0, b, d}, site);
  }
};
}  // namespace cufa_host

template <int N, bool BF16>
struct Wgmma : cufa_host::WgmmaTwin<N, BF16 ? cufa_host::Format::bf16 : cufa_host::Format::f16> {};
template <int N>
struct WgmmaE4m3 : cufa_host::WgmmaTwin<N, cufa_host::Format::e4m3> {};
template <int N, bool BF16>
struct WgmmaTransposedB {
  template <bool ACCUMULATES>
  static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, SITE) {
    Wgmma<N, BF16>::template ss<ACCUMULATES, true>(d, a, b, site);
  }
};

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
