// The elements of tensors: their bytes, and how float32 becomes one and back. A kernel's config.cuh names its own `Element`.
// 16-bit elements travel as bits, two in a u32.
#pragma once
#include "primitives/primitives.cuh"

struct Float16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_BFLOAT16 = false;
  static DEVICE u32 pack(float lo, float hi) { return cvt_f16x2(lo, hi); }  // rounded to nearest even
  static DEVICE float widen(u16 bits) { return cvt_f32_f16(bits); }
};

struct BFloat16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_BFLOAT16 = true;
  static DEVICE u32 pack(float lo, float hi) { return cvt_bf16x2(lo, hi); }
  static DEVICE float widen(u16 bits) { return cvt_f32_bf16(bits); }
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

// Two packed 16-bit values to global memory, whose rows are aligned to ALIGNMENT bytes.
template <int ALIGNMENT>
DEVICE void store_pair(char* global, u32 pair) {
  if constexpr (ALIGNMENT >= 4) {
    st_global(global, pair);
  } else {
    st_global(global, u16(pair));
    st_global(global + 2, u16(pair >> 16));
  }
}
