// DETERMINISTIC: gradients of a score function's arrays. Any score may add to any element, so that additions have no order. A sum
// here is a fixed-point number of DIGITS digits of 32 bits, which additions of integers give exactly, whatever their order. The
// convert pass rounds each sum to float32, once.
#pragma once
#include "backward/common/listed_tickets.cuh"
#include "primitives/reduction.cuh"

// A digit has 64 bits: its own 32, and room for the carries of 2^31 additions. Digit i counts units of 2^(32 i + LEAST_EXPONENT).
constexpr int DIGITS = 9, LEAST_EXPONENT = -128;
constexpr int SUM_BYTES = 8 * (DIGITS + 1);  // and how many addends were infinite or NaN

// Adds a float. What lies below 2^LEAST_EXPONENT is dropped.
DEVICE void add_exactly(char* sum, float x) {
  const u32 bits = float_as_u32(x), exponent = bits >> 23 & 0xff;
  if (exponent == 255) return red_add_u64(sum + 8 * DIGITS, 1);
  const int place = int(exponent) - (127 + 23) - LEAST_EXPONENT;  // of the mantissa's last bit
  const u32 mantissa = exponent == 0 ? 0 : (bits & 0x7fffff) | 0x800000;
  const u64 shifted = place < 0 ? u64(mantissa >> min(-place, 31)) : u64(mantissa) << place % 32;
  const u64 value = (bits >> 31) != 0 ? 0 - shifted : shifted;
  if (value == 0) return;
  char* const digit = sum + 8 * (max(place, 0) / 32);
  red_add_u64(digit, value & 0xffffffff);
  const u64 carry = u64(i64(value) >> 32);
  if (carry != 0) red_add_u64(digit + 8, carry);
}

// The sum, rounded to float32.
DEVICE float exact_sum(const char* sum) {
  if (ld_global<u64>(sum + 8 * DIGITS) != 0) return u32_as_float(0x7fffffff);  // NaN
  u32 digits[DIGITS];
  i64 carry = 0;
#pragma unroll
  for (int i = 0; i < DIGITS; ++i) {
    carry += i64(ld_global<u64>(sum + 8 * i));
    digits[i] = u32(carry);
    carry >>= 32;
  }
  double value = double(carry);  // negative sums: -1, and digits of the complement
#pragma unroll
  for (int i = DIGITS - 1; i >= 0; --i) value = value * 4294967296.0 + double(digits[i]);
  return float(value * 2.938735877055719e-39);  // 2^LEAST_EXPONENT
}

// The sums of all arrays, array after array, before the tickets of the workspace.
template <typename Params>
struct ExactSums {
  const Params& p;

  DEVICE static i64 elements(const ScoreArray& x) { return i64(x.size0) * x.size1 * x.size2 * x.size3; }
  // Calls visit(array, gradient, first sum) for each array whose gradient is wanted.
  template <typename Visit>
  DEVICE void each(const Visit& visit) const {
    const ScoreArray* const arrays[4] = {&p.array0, &p.array1, &p.array2, &p.array3};
    float* const gradients[4] = {p.dscore0, p.dscore1, p.dscore2, p.dscore3};
    char* end = static_cast<char*>(p.workspace) + p.mask.workspace;
    if constexpr (LISTED_TICKETS) end = reinterpret_cast<char*>(ListedTickets(p).tickets);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (gradients[n] == nullptr) continue;
      end -= elements(*arrays[n]) * SUM_BYTES;
      visit(*arrays[n], gradients[n], end);
    }
  }
  // The first sum of an array, by its gradient.
  DEVICE char* of(const float* gradient) const {
    char* found = nullptr;
    each([&](const ScoreArray&, const float* own, char* sums) {
      if (own == gradient) found = sums;
    });
    return found;
  }
  // The prepare pass, by all its threads.
  template <int THREADS>
  DEVICE void clear() const {
    each([&](const ScoreArray& x, float*, char* sums) {
      const i64 count = elements(x) * (SUM_BYTES / 16);
      for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < count; i += i64(gridDim.x) * THREADS) {
        st_global(sums + i * 16, vec4{0, 0, 0, 0});
      }
    });
  }
  // The convert pass, by all its threads.
  template <int THREADS>
  DEVICE void round() const {
    each([&](const ScoreArray& x, float* gradient, const char* sums) {
      for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < elements(x); i += i64(gridDim.x) * THREADS) {
        st_global(gradient + i, exact_sum(sums + i * SUM_BYTES));
      }
    });
  }
};
