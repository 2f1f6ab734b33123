// Partial attention in global memory and its exact merge, for decoding and the forward's split keys. The keys of a row are split
// over thread blocks. Part i is (O_i, m_i, l_i), O_i not yet divided by l_i, m_i in units of log2:
//   M = max m_i,   L = sum l_i 2^(m_i - M),   O = sum O_i 2^(m_i - M) / L,   lse = (M + log2 L) ln 2.
// Parts are added in the order of their keys, whichever block finishes first: results are reproducible.
//
// A row of a part: V_DIM floats of O, m, l, and two words of padding.
#pragma once
#include "shared/element.cuh"
#include "shared/softmax.cuh"

constexpr int VECTORS = V_DIM / 4;   // vectors of four columns in a row of O
constexpr int SLOT_ROW = V_DIM + 4;  // floats in a row of a part

// (o, m, l) merged with part (o_part, ml_part).
DEVICE void add_part(float (&o)[4], float& m, float& l, vec4 o_part, vec2 ml_part) {
  const float m_part = u32_as_float(ml_part.x), m_new = fmaxf(m, m_part);
  const float old_weight = ex2(m - m_new), weight = ex2(m_part - m_new);
  m = m_new;
  l = l * old_weight + u32_as_float(ml_part.y) * weight;
  o[0] = o[0] * old_weight + u32_as_float(o_part.x) * weight;
  o[1] = o[1] * old_weight + u32_as_float(o_part.y) * weight;
  o[2] = o[2] * old_weight + u32_as_float(o_part.z) * weight;
  o[3] = o[3] * old_weight + u32_as_float(o_part.w) * weight;
}

// One vector of columns of a row, merged over its parts in order. row_of(part): address of the row in that part.
template <typename RowOf>
DEVICE void merge_parts(float (&o)[4], float& m, float& l, int num_parts, int vector, RowOf row_of) {
  constexpr int AT_ONCE = 16;  // parts loaded at once: the parts of eight heads in one wave of blocks
#pragma unroll 1
  for (int first = 0; first < num_parts; first += AT_ONCE) {
    vec4 o_part[AT_ONCE];
    vec2 ml_part[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float* row = row_of(min(first + j, num_parts - 1));
      o_part[j] = ld_global<vec4>(row + vector * 4);
      ml_part[j] = ld_global<vec2>(row + V_DIM);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      if (first + j < num_parts) add_part(o, m, l, o_part[j], ml_part[j]);
    }
  }
}

// Four columns of a row, times `factor`, to the output.
DEVICE void store_vector(char* O, const float (&o)[4], float factor) {
  const vec2 packed = {Element::pack(o[0] * factor, o[1] * factor),
                       Element::pack(o[2] * factor, o[3] * factor)};
  if constexpr (ALIGNMENT >= 8) {
    st_global(O, packed);
  } else {
    store_pair<ALIGNMENT>(O, packed.x);
    store_pair<ALIGNMENT>(O + 4, packed.y);
  }
}
