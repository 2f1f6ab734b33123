// Host twins of the primitives that decode kernels alone use: grid.cuh, float8.cuh.
#pragma once
#include "host/hopper_host.h"

namespace cufa_host {

// memory.cpp
u32 increment_global(u32* global, u32 last, Site site);

// overlap.cpp
void let_next_launch_begin();
void await_launch_before();

inline u16 e4m3_as_half(u32 x) {
  const u32 sign = (x & 0x80) << 8, rest = x & 0x7f;
  if (rest == 0x7f) return u16(sign | 0x7fff);                     // NaN; there is no infinity
  if (rest >= 8) return u16(sign | ((rest << 7) + (8 << 10)));     // exponent bias 7 -> 15
  return u16(sign | half_from_float(float(rest) / 512));  // subnormal: units of 2^-9
}

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

// ---- grid.cuh
DEVICE u32 atomic_inc_wrap(u32* counter, u32 last, SITE) { return cufa_host::increment_global(counter, last, site); }

// Launches follow one another here, but in checked mode what is touched too early is found.
DEVICE void grid_release_next() { cufa_host::let_next_launch_begin(); }
DEVICE void grid_await_previous() { cufa_host::await_launch_before(); }

// ---- float8.cuh
DEVICE u32 cvt_f16x2_e4m3x2(u16 x) { return cufa_host::e4m3_as_half(x & 0xff) | u32(cufa_host::e4m3_as_half(x >> 8)) << 16; }
DEVICE u32 byte_permute(u32 lo, u32 hi, u32 selector) {
  const u64 bytes = u64(hi) << 32 | lo;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

#undef SITE
