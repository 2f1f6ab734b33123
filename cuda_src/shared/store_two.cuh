// Results that leave registers two at a time: of fa1, of the float32 kernels, and float32 gradients.
#pragma once
#include "shared/element.cuh"

// Two neighbouring values to global memory, whose rows are aligned to ALIGNMENT bytes, if `valid`.
template <typename Element, int ALIGNMENT>
DEVICE void store_two(char* global, float x, float y, bool valid = true) {
  if constexpr (Element::BYTES == 2) {
    const u32 pair = Element::pack(x, y);
    if (valid) store_pair<ALIGNMENT>(global, pair);
    return;
  }
  if (!valid) return;
  if constexpr (ALIGNMENT >= 8) {
    st_global(global, vec2{float_as_u32(x), float_as_u32(y)});
  } else {
    st_global(global, float_as_u32(x));
    st_global(global + 4, float_as_u32(y));
  }
}
