// Structures of 8 or 16 bytes in shared memory (item descriptors), each read and written in one access.
#pragma once
#include "primitives/primitives.cuh"

template <typename To, typename From>
DEVICE To bits_as(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "one access moves 8 or 16 bytes");
  To bits;
  memcpy(&bits, &x, sizeof(To));
  return bits;
}
template <typename T>
DEVICE void write_shared(u32 smem, const T& x) {
  static_assert(sizeof(T) == 16 || sizeof(T) == 8, "one access moves 8 or 16 bytes");
  if constexpr (sizeof(T) == 16) st_shared_vec4(smem, bits_as<vec4>(x));
  if constexpr (sizeof(T) == 8) st_shared_vec2(smem, bits_as<vec2>(x));
}
template <typename T>
DEVICE T read_shared(u32 smem) {
  if constexpr (sizeof(T) == 16) return bits_as<T>(ld_shared_vec4(smem));
  if constexpr (sizeof(T) == 8) return bits_as<T>(ld_shared_vec2(smem));
}
