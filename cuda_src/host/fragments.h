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

inline float half_value(u32 x) { return float_from_half(static_cast<u16>(x)); }
inline float bfloat16_value(u32 x) { return u32_as_float(x << 16); }

inline const std::array<float, 256> kValuesOfE4m3 = [] {
  std::array<float, 256> values;
  for (u32 byte = 0; byte < 256; ++byte) values[byte] = cvt_f32_f16(u16(cvt_f16x2_e4m3x2(u16(byte))));
  return values;
}();

// 4n numbers of e4m3 in n words, in order.
inline void widen_e4m3(const u32* words, int n, float* out) {
  for (int i = 0; i < 4 * n; ++i) out[i] = kValuesOfE4m3[words[i / 4] >> i % 4 * 8 & 0xff];
}

// 2n 16-bit values in n words, in order.
template <float (*VALUE)(u32)>
inline void widen(const u32* words, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    out[2 * i] = VALUE(words[i] & 0xffff);
    out[2 * i + 1] = VALUE(words[i] >> 16);
  }
}
#ifdef __F16C__
template <>
inline void widen<half_value>(const u32* words, int n, float* out) {
  for (int i = 0; i < n; i += 4) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
    _mm256_storeu_ps(out + 2 * i, _mm256_cvtph_ps(eight));
  }
}
#endif

// A (16 x 8*KB) in 2*KB blocks of 8x8, B in KB blocks of rows k; D is 16x8.
template <float (*VALUE)(u32)>
void load_operands_16bit(const u32 (*a)[32], const u32 (*b)[32], float (*A)[8][8], Row* B) {
  widen<VALUE>(a[0], 128, &A[0][0][0]);
  for (int half = 0; half < 2; ++half) {
    float pairs[4][8][2];  // [t][column][k parity]
    widen<VALUE>(b[half], 32, &pairs[0][0][0]);
    for (int t = 0; t < 4; ++t) {
      for (int column = 0; column < 8; ++column) {
        B[8 * half + 2 * t][column] = pairs[t][column][0];
        B[8 * half + 2 * t + 1][column] = pairs[t][column][1];
      }
    }
  }
}

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
