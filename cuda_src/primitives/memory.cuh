// Loads and stores. Shared memory is addressed by 32-bit offsets in the shared window, through these functions only: on a host
// they check races, ranges and bank conflicts.
#pragma once
#include "primitives/types.cuh"

// cvta.to.shared: generic pointer -> 32-bit shared address.
DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE void st_shared_u16(u32 smem, u16 v) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(smem), "h"(v) : "memory"); }
DEVICE void st_shared_u32(u32 smem, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(v) : "memory"); }
DEVICE void st_shared_f32(u32 smem, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(v) : "memory"); }
DEVICE void st_shared_vec2(u32 smem, vec2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(smem), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void st_shared_vec4(u32 smem, vec4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE u16 ld_shared_u16(u32 smem) {
  u16 v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(smem) : "memory");
  return v;
}
DEVICE u32 ld_shared_u32(u32 smem) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}
DEVICE float ld_shared_f32(u32 smem) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
  return v;
}
DEVICE vec2 ld_shared_vec2(u32 smem) {
  vec2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem) : "memory");
  return v;
}
DEVICE vec4 ld_shared_vec4(u32 smem) {
  vec4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}

// Global memory, typed: T is u16, u32, u64, float, vec2 or vec4, aligned to its size.
template <typename T>
DEVICE T ld_global(const void* p) {
  return *static_cast<const T*>(p);
}
template <typename T>
DEVICE void st_global(void* p, T v) {
  *static_cast<T*>(p) = v;
}

// st.global.v4.b32, st.global.v2.b32: the compiler may split the plain store of a struct into words.
template <>
DEVICE void st_global<vec4>(void* p, vec4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <>
DEVICE void st_global<vec2>(void* p, vec2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
