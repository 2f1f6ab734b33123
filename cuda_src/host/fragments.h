// Fragments of a warp's 16 x 8 products as float32 matrices, and the product itself.
#pragma once
#include <array>
#include <cstring>

#include "host/runtime.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace cufa_host {

using Row = float __attribute__((vector_size(32)));  // 8 columns of D or B

inline const std::array<float, 256> kValuesOfE4m3 = [] {
  std::array<float, 256> values;
  for (u32 byte = 0; byte < 256; ++byte) values[byte] = cvt_f32_f16(u16(cvt_f16x2_e4m3x2(u16(byte))));
  return values;
}();

// The formats of operands: bits of an element, and its value.
struct Half {
  static constexpr int kBits = 16;
  static float value(u32 x) { return float_from_half(u16(x)); }
};
struct Bfloat16 {
  static constexpr int kBits = 16;
  static float value(u32 x) { return u32_as_float(x << 16); }
};
struct Tf32 {
  static constexpr int kBits = 32;
  static float value(u32 x) { return u32_as_float(x & 0xffffe000u); }
};
struct E4m3 {
  static constexpr int kBits = 8;
  static float value(u32 x) { return kValuesOfE4m3[x]; }
};
// f(Half{}), or the other format's.
template <typename F>
void with_element(Format format, F f) {
  switch (format) {
    case Format::f16: return f(Half{});
    case Format::bf16: return f(Bfloat16{});
    case Format::tf32: return f(Tf32{});
    case Format::e4m3: return f(E4m3{});
  }
}
template <typename Element>
constexpr int kPerWord = 32 / Element::kBits;
// Columns of A, and rows of B, that 16 bytes hold: half of a product's K.
template <typename Element>
constexpr int kWidth = 128 / Element::kBits;

// The elements of n words, in order.
template <typename Element>
inline void widen(const u32* words, int n, float* out) {
  constexpr int kUnused = 32 - Element::kBits;
  for (int i = 0; i < n; ++i) {
    for (int e = 0; e < kPerWord<Element>; ++e) *out++ = Element::value(words[i] << (kUnused - e * Element::kBits) >> kUnused);
  }
}
#ifdef __F16C__
template <>
inline void widen<Half>(const u32* words, int n, float* out) {
  for (int i = 0; i < n; i += 4) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
    _mm256_storeu_ps(out + 2 * i, _mm256_cvtph_ps(eight));
  }
}
#endif

// C += A B, 16 x K times K x 8, added in order of k. (The hardware adds in a wider fixed-point sum; golden vectors bound the
// difference.)
template <int BLOCK_K>
void multiply_add(const float (*A)[8][BLOCK_K], const Row* B, Row* C) {
  for (int half = 0; half < 2; ++half) {  // rows 0-7, rows 8-15: eight accumulators stay in registers
    Row c[8];
    for (int r = 0; r < 8; ++r) c[r] = C[8 * half + r];
    for (int kb = 0; kb < 2; ++kb) {
      const float (*block)[BLOCK_K] = A[2 * kb + half];
      for (int k = 0; k < BLOCK_K; ++k) {
        const Row b = B[BLOCK_K * kb + k];
        for (int r = 0; r < 8; ++r) c[r] += block[r][k] * b;
      }
    }
    for (int r = 0; r < 8; ++r) C[8 * half + r] = c[r];
  }
}

// D's registers of all lanes to and from 16 rows: lane 4g + t holds columns 2t, 2t+1 of rows g and g+8.
inline void gather_rows(float* const (&d)[32], int offset, Row* C) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    std::memcpy(reinterpret_cast<float*>(&C[g]) + 2 * t, d[lane] + offset, 8);
    std::memcpy(reinterpret_cast<float*>(&C[g + 8]) + 2 * t, d[lane] + offset + 2, 8);
  }
}
inline void scatter_rows(const Row* C, float* const (&d)[32], int offset) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    std::memcpy(d[lane] + offset, reinterpret_cast<const float*>(&C[g]) + 2 * t, 8);
    std::memcpy(d[lane] + offset + 2, reinterpret_cast<const float*>(&C[g + 8]) + 2 * t, 8);
  }
}

// The content of an accumulator while a product in flight owns it (checked mode): a signalling NaN, whose bits any arithmetic
// changes.
constexpr u32 kPoison = 0x7fa0dead;

}  // namespace cufa_host
