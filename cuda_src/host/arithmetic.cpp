// Conversions, exponentials and logarithms with the GPU's treatment of small numbers; clocks.
#include <chrono>
#include <cmath>

#include "host/runtime.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace cufa_host {

#ifdef __F16C__
u16 half_from_float(float x) { return x != x ? 0x7fff : _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
float float_from_half(u16 x) { return _cvtsh_ss(x); }
#else
u16 half_from_float(float x) {
  const u32 bits = float_as_u32(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x47800000) return sign | 0x7c00;  // 2^16 and more
  if (magnitude < 0x38800000) {                       // below 2^-14: subnormal, in units of 2^-24
    return sign | static_cast<u16>(std::nearbyint(std::fabs(x) * 0x1p24f));
  }
  const u32 rebiased = magnitude - 0x38000000;
  return sign | static_cast<u16>((rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);  // may round up to infinity
}
float float_from_half(u16 x) {
  const u32 sign = u32(x & 0x8000) << 16, magnitude = x & 0x7fff;
  if (magnitude >= 0x7c00) return u32_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) return u32_as_float(sign | float_as_u32(magnitude * 0x1p-24f));
  return u32_as_float(sign | ((magnitude << 13) + 0x38000000));
}
#endif

static u32 bfloat16_from_float(float x) {
  const u32 bits = float_as_u32(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

static u16 half_from_e4m3(u32 x) {
  const u32 sign = (x & 0x80) << 8, rest = x & 0x7f;
  if (rest == 0x7f) return u16(sign | 0x7fff);                  // NaN; there is no infinity
  if (rest >= 8) return u16(sign | ((rest << 7) + (8 << 10)));  // exponent bias 7 -> 15
  return u16(sign | half_from_float(float(rest) / 512));        // subnormal: units of 2^-9
}

// Rounded to nearest even; beyond 448 it is 448.
static u32 e4m3_from_float(float x) {
  const u32 sign = float_as_u32(x) >> 24 & 0x80;
  if (x != x) return 0x7f;
  const float magnitude = std::min(std::fabs(x), 448.0f);
  int exponent = std::max(std::ilogb(magnitude), -6);  // 3 above the exponent of the last place
  if (magnitude == 0.0f) exponent = -6;
  const u32 units = u32(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | (u32(exponent + 6) * 8 + units);  // 8 units are the implicit bit: they count the exponent up
}

}  // namespace cufa_host

u32 cvt_f16x2(float lo, float hi) { return half_from_float(lo) | u32(half_from_float(hi)) << 16; }
u32 cvt_f16x2_satfinite(float lo, float hi) {
  const auto clamped = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };  // NaN stays NaN
  return cvt_f16x2(clamped(lo), clamped(hi));
}
u32 cvt_bf16x2(float lo, float hi) { return bfloat16_from_float(lo) | bfloat16_from_float(hi) << 16; }
float cvt_f32_f16(u16 x) { return float_from_half(x); }
u32 cvt_tf32(float x) {
  const u32 bits = float_as_u32(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & 0xffffe000u;
  return (bits + 0x1000u) & 0xffffe000u;  // ties away from zero: the magnitude is rounded half up
}
u32 cvt_f16x2_e4m3x2(u16 x) { return half_from_e4m3(x & 0xff) | u32(half_from_e4m3(x >> 8)) << 16; }
u32 cvt_e4m3x2(float lo, float hi) { return e4m3_from_float(lo) | e4m3_from_float(hi) << 8; }
u32 byte_permute(u32 lo, u32 hi, u32 selector) {
  const u64 bytes = u64(hi) << 32 | lo;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 byte = u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff);
    r |= (selector >> 4 * i & 8 ? byte >> 7 ? 0xff : 0 : byte) << 8 * i;
  }
  return r;
}

float ex2(float x) {
  ++current().block->counters.exponentials;
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
float lg2(float x) { return std::log2(flush_subnormal(x)); }
float rcp(float x) {
  ++current().block->counters.reciprocals;
  return flush_subnormal(1.0f / flush_subnormal(x));
}
float fma_sat(float x, float y, float z) {
  const float sum = std::fma(flush_subnormal(x), flush_subnormal(y), flush_subnormal(z));
  return sum > 0.0f ? flush_subnormal(std::fmin(sum, 1.0f)) : 0.0f;
}

u64 global_timer() {
  using namespace std::chrono;
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}
u32 sm_id() { return current().block->cluster.worker; }

u64 sm_clock() {
  static thread_local u64 executed = 0;  // by this worker; one more with each reading
  Block& block = *current().block;
  const Counters& c = block.counters;
  const u64 now = c.ldmatrix + c.stmatrix + c.mma + c.wgmma + c.exponentials + c.shuffles + c.votes + c.async_copies +
                  c.bulk_copies + c.reductions + c.barrier_waits + c.mbarrier_waits + c.warp_syncs;
  executed += now - block.clock_seen + 1;
  block.clock_seen = now;
  return executed;
}
u32 sm_clock_low() { return static_cast<u32>(sm_clock()); }
