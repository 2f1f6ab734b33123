// Host twins of primitives/*.cuh: the same names and arguments, for a kernel that g++ compiles and a CPU executes,
// every CUDA thread a fiber. A test holds the two sets of names together; golden vectors recorded on a GPU hold
// the results together.
//
// Twins that many lanes must reach together park the calling lane; the last one to arrive executes for the warp.
// Products (mma) are queued and executed at the warp's next such operation, mma_fence() being the cheapest.
//
// What this cannot say about a kernel: how fast it is, how many registers it takes, whether the operand string of an asm
// statement is right, how warps interleave inside one instruction.
#pragma once
#include "primitives/types.cuh"

namespace cufa_host {

// barriers.cpp
void barrier_sync(int id, int num_threads, Site site);
void barrier_arrive(int id, int num_threads, Site site);
void block_barrier(Site site);
void warp_barrier(Site site);

// collectives.cpp
enum class Matrices { x2, x4, x2_trans, x4_trans };
void load_matrices(Matrices form, u32* registers, u32 smem, Site site);
u32 shuffle_xor(u32 value, int lane_mask, Site site);
u32 shuffle_from(u32 value, int source_lane, Site site);
u32 reduce_max(u32 value, Site site);
bool vote_any(bool value, Site site);

// tensor_core.cpp
enum class Product { m16n8k16_f16, m16n8k16_bf16, m16n8k8_tf32 };
void queue_product(Product kind, float* d, const u32* a, u32 b0, u32 b1, Site site);
void execute_products(Site site);

// memory.cpp: every access is translated, and in checked mode tested, before it is made.
void load_shared(void* value, u32 smem, u32 bytes, Site site);
void store_shared(u32 smem, const void* value, u32 bytes, Site site);
void load_global(void* value, const void* global, u32 bytes, Site site);
void store_global(void* global, const void* value, u32 bytes, Site site);
u32 add_global(u32* global, u32 value, Site site);
u32 shared_address(const void* pointer);

// async_copy.cpp
void copy_async(u32 smem, const void* global, u32 bytes, bool valid, Site site);
void commit_copies();
void await_copies(u32 pending);

// arithmetic.cpp
float exponential2(float x);
float logarithm2(float x);
float reciprocal(float x);
float clamped_sum(float x, float y, float z);
u16 half_from_float(float x);
float float_from_half(u16 x);
u32 bfloat16_from_float(float x);
u64 nanoseconds();
u32 worker_id();

template <typename T>
DEVICE T load_shared(u32 smem, Site site) {
  T value;
  load_shared(&value, smem, sizeof(T), site);
  return value;
}

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

// ---- barrier.cuh
DEVICE void bar_sync(int id, int num_threads, SITE) { cufa_host::barrier_sync(id, num_threads, site); }
DEVICE void bar_arrive(int id, int num_threads, SITE) { cufa_host::barrier_arrive(id, num_threads, site); }
DEVICE void block_sync(SITE) { cufa_host::block_barrier(site); }
DEVICE void warp_sync(SITE) { cufa_host::warp_barrier(site); }

// ---- convert.cuh
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
DEVICE u32 cvt_f16x2(float lo, float hi) {
  return cufa_host::half_from_float(lo) | u32(cufa_host::half_from_float(hi)) << 16;
}
DEVICE u32 cvt_f16x2_satfinite(float lo, float hi) {
  constexpr float LARGEST = 65504.0f;  // NaN stays NaN
  lo = lo > LARGEST ? LARGEST : lo < -LARGEST ? -LARGEST : lo;
  hi = hi > LARGEST ? LARGEST : hi < -LARGEST ? -LARGEST : hi;
  return cvt_f16x2(lo, hi);
}
DEVICE u32 cvt_bf16x2(float lo, float hi) {
  return cufa_host::bfloat16_from_float(lo) | cufa_host::bfloat16_from_float(hi) << 16;
}
DEVICE float cvt_f32_f16(u16 x) { return cufa_host::float_from_half(x); }
DEVICE float cvt_f32_bf16(u16 x) { return u32_as_float(u32(x) << 16); }
DEVICE u32 cvt_tf32(float x) {
  const u32 bits = float_as_u32(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & 0xffffe000u;
  return (bits + 0x1000u) & 0xffffe000u;  // ties away from zero: the magnitude is rounded half up
}

// ---- cp_async.cuh
DEVICE void cp_async_16(u32 smem, const void* global, bool valid, SITE) {
  cufa_host::copy_async(smem, global, 16, valid, site);
}
template <int BYTES>
DEVICE void cp_async_small(u32 smem, const void* global, bool valid, SITE) {
  static_assert(BYTES == 4 || BYTES == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  cufa_host::copy_async(smem, global, BYTES, valid, site);
}
DEVICE void cp_async_commit() { cufa_host::commit_copies(); }
template <int PENDING>
DEVICE void cp_async_wait() {
  cufa_host::await_copies(PENDING);
}

// ---- ldmatrix.cuh
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 smem, SITE) {
  cufa_host::load_matrices(cufa_host::Matrices::x4, r, smem, site);
}
DEVICE void ldmatrix_x2(u32 (&r)[2], u32 smem, SITE) {
  cufa_host::load_matrices(cufa_host::Matrices::x2, r, smem, site);
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 smem, SITE) {
  cufa_host::load_matrices(cufa_host::Matrices::x4_trans, r, smem, site);
}
DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 smem, SITE) {
  cufa_host::load_matrices(cufa_host::Matrices::x2_trans, r, smem, site);
}

// ---- math.cuh
#define NEG_INF u32_as_float(0xff800000u)
DEVICE float ex2(float x) { return cufa_host::exponential2(x); }
DEVICE float lg2(float x) { return cufa_host::logarithm2(x); }
DEVICE float rcp(float x) { return cufa_host::reciprocal(x); }
DEVICE float fma_sat(float x, float y, float z) { return cufa_host::clamped_sum(x, y, z); }

// ---- memory.cuh
DEVICE u32 smem_address(const void* p) { return cufa_host::shared_address(p); }
DEVICE void st_shared_u16(u32 smem, u16 v, SITE) { cufa_host::store_shared(smem, &v, 2, site); }
DEVICE void st_shared_u32(u32 smem, u32 v, SITE) { cufa_host::store_shared(smem, &v, 4, site); }
DEVICE void st_shared_f32(u32 smem, float v, SITE) { cufa_host::store_shared(smem, &v, 4, site); }
DEVICE void st_shared_vec2(u32 smem, vec2 v, SITE) { cufa_host::store_shared(smem, &v, 8, site); }
DEVICE void st_shared_vec4(u32 smem, vec4 v, SITE) { cufa_host::store_shared(smem, &v, 16, site); }
DEVICE u16 ld_shared_u16(u32 smem, SITE) { return cufa_host::load_shared<u16>(smem, site); }
DEVICE u32 ld_shared_u32(u32 smem, SITE) { return cufa_host::load_shared<u32>(smem, site); }
DEVICE float ld_shared_f32(u32 smem, SITE) { return cufa_host::load_shared<float>(smem, site); }
DEVICE vec2 ld_shared_vec2(u32 smem, SITE) { return cufa_host::load_shared<vec2>(smem, site); }
DEVICE vec4 ld_shared_vec4(u32 smem, SITE) { return cufa_host::load_shared<vec4>(smem, site); }
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

// ---- mma.cuh
DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  cufa_host::queue_product(cufa_host::Product::m16n8k16_f16, d, a, b0, b1, site);
}
DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  cufa_host::queue_product(cufa_host::Product::m16n8k16_bf16, d, a, b0, b1, site);
}
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  cufa_host::queue_product(cufa_host::Product::m16n8k8_tf32, d, a, b0, b1, site);
}
DEVICE void mma_fence(SITE) { cufa_host::execute_products(site); }

// ---- shuffle.cuh
DEVICE float shfl_xor(float v, int lane_mask, SITE) {
  return u32_as_float(cufa_host::shuffle_xor(float_as_u32(v), lane_mask, site));
}
DEVICE u32 shfl_xor(u32 v, int lane_mask, SITE) { return cufa_host::shuffle_xor(v, lane_mask, site); }
DEVICE u32 redux_max(u32 v, SITE) { return cufa_host::reduce_max(v, site); }
DEVICE u32 shfl(u32 v, int source_lane, SITE) { return cufa_host::shuffle_from(v, source_lane, site); }
DEVICE bool warp_any(bool v, SITE) { return cufa_host::vote_any(v, site); }

// ---- special_registers.cuh
DEVICE u64 global_timer() { return cufa_host::nanoseconds(); }
DEVICE int lane_id() { return cufa_host::context->thread_index.x % 32; }
DEVICE int thread_id() { return cufa_host::context->thread_index.x; }
DEVICE u32 sm_id() { return cufa_host::worker_id(); }
DEVICE u32 atomic_add(u32* p, u32 v, SITE) { return cufa_host::add_global(p, v, site); }

#undef SITE
