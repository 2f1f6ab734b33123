// Conversions, exponentials and logarithms with the GPU's treatment of small numbers.
#include <chrono>
#include <cmath>
#include <cstring>

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

u32 bfloat16_from_float(float x) {
  const u32 bits = float_as_u32(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

float exponential2(float x) {
  ++current().block->counters.exponentials;
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}

float logarithm2(float x) { return std::log2(flush_subnormal(x)); }

float reciprocal(float x) {
  ++current().block->counters.reciprocals;
  return flush_subnormal(1.0f / flush_subnormal(x));
}

float clamped_sum(float x, float y, float z) {
  const float sum = std::fma(flush_subnormal(x), flush_subnormal(y), flush_subnormal(z));
  return sum > 0.0f ? flush_subnormal(std::fmin(sum, 1.0f)) : 0.0f;
}

u64 nanoseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

u32 worker_id() { return current().block->worker; }

u64 executed_primitives() {
  static thread_local u64 executed = 0;  // by this worker; one more with each reading
  Block& block = *current().block;
  const Counters& c = block.counters;
  const u64 now = c.ldmatrix + c.stmatrix + c.mma + c.wgmma + c.exponentials + c.shuffles + c.votes + c.async_copies +
                  c.bulk_copies + c.reductions + c.barrier_waits + c.mbarrier_waits + c.warp_syncs;
  executed += now - block.clock_seen + 1;
  block.clock_seen = now;
  return executed;
}

}  // namespace cufa_host
