// The elements of tensors: their bytes, how float32 becomes one and back, and the tensor-core product that takes them. A kernel's
// config.cuh names its own `Element`. 16-bit elements travel as bits, two in a u32.
#pragma once
#include "primitives/primitives.cuh"

struct Float16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_BFLOAT16 = false;
  static DEVICE u32 pack(float lo, float hi) { return cvt_f16x2(lo, hi); }  // rounded to nearest even
  static DEVICE float widen(u16 bits) { return cvt_f32_f16(bits); }
  // D (16 x 8, float32) += A (16 x 16) B (16 x 8), by a warp.
  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_f16(d, a, b0, b1); }
};

struct BFloat16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_BFLOAT16 = true;
  static DEVICE u32 pack(float lo, float hi) { return cvt_bf16x2(lo, hi); }
  static DEVICE float widen(u16 bits) { return cvt_f32_bf16(bits); }
  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_bf16(d, a, b0, b1); }
};

struct Float32 {
  static constexpr int BYTES = 4;
};

template <bool IS_FIRST, typename First, typename Second>
struct Choose {
  using type = First;
};
template <typename First, typename Second>
struct Choose<false, First, Second> {
  using type = Second;
};
template <bool IS_BFLOAT16>
using SixteenBit = typename Choose<IS_BFLOAT16, BFloat16, Float16>::type;
