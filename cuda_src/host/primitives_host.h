// Host twins of primitives/*.cuh: the same names and arguments, for a kernel that g++ compiles and a CPU executes, every CUDA
// thread a fiber. Most twins are functions of the runtime. A test compares the two sets of names; golden vectors recorded on a
// GPU compare results.
//
// A warp-collective twin parks the calling lane; the last lane to arrive executes for the warp. Products (mma) are queued, and
// executed at the warp's next collective; mma_fence() is the cheapest.
//
// The twins cannot tell how fast a kernel is, how many registers it takes, whether the operand string of an asm statement is
// right, or how warps interleave inside one instruction.
#pragma once
#include "primitives/types.cuh"

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
