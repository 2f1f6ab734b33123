// decode_append quantises new 16-bit tokens to e4m3 and stores them and their scales to the cache, before the attention launch.
//
// OF_TOKEN: the scale maps the token's largest magnitude to 448, the largest e4m3 number. OF_BLOCK: the call that writes a
// block's first tokens chooses the block's scale: HEADROOM times their largest magnitude becomes 448, so that most later tokens
// fit. Later calls use this scale; larger magnitudes saturate at 448. The headroom costs no precision: e4m3 spans 15 powers of
// two. cufa/run/cpu/cache.py has the same arithmetic.
#pragma once
#include "decode/maximum.cuh"

constexpr float HEADROOM = KEY_SCALES == OF_BLOCK ? 8.0f : 1.0f;

struct NewRows {
  const char* x;  // row 0 of the new tokens of this sequence and head
  i64 stride;     // bytes from token to token
  int lane;

  DEVICE float load(int token, int column) const {
    return Element::widen(ld_global<u16>(x + token * stride + column * 2));
  }

  // The largest magnitude in the rows of tokens first ... last - 1; all lanes must call.
  DEVICE float largest(int first, int last) const {
    u32 found = 0;
    for (int token = first; token < last; ++token) {
      for (int column = lane; column < HEAD_DIM; column += 32) {
        found = max(found, float_as_u32(load(token, column)) & 0x7fffffff);
      }
    }
    return u32_as_float(redux_max(found));
  }
};

// One block per new token and head: warp 0 takes the key, warp 1 the value. Grid: (new tokens, kv_heads, batch).
KERNEL __launch_bounds__(64) decode_append(const __grid_constant__ KernelParams p) {
  if constexpr (QUANTIZE_NEW) {
    const int token = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
    const bool of_values = threadIdx.x / 32 == 1;
    const Lengths length = sequence_lengths(p, batch);
    const int place = length.old_keys + token;
    if (place >= length.keys) return;
    int outer = batch, slot = place;
    if constexpr (PAGED) {
      outer = int(ld_global<u32>(p.block_table + batch * p.table_stride + place / p.page_size));
      slot = place % p.page_size;
      if (page_is_wild(p, outer)) return;
    }
    const Strides& from = of_values ? p.v_new_stride : p.k_new_stride;
    const Strides& to = of_values ? p.v_stride : p.k_stride;
    const NewRows rows{static_cast<const char*>(of_values ? p.v_new : p.k_new) + 2 * (batch * from.batch + kv_head * from.head),
                       2 * from.seq, lane};
    float* scale_at = const_cast<float*>(of_values ? p.v_scale : p.k_scale) + key_scale_index(p, outer, kv_head, slot);
    int first = token, last = token + 1;  // the new tokens whose largest magnitude sets this token's scale
    if constexpr (KEY_SCALES == OF_BLOCK) {
      const int block = PAGED ? p.page_size : SCALE_BLOCK;
      first = token - slot % block;
      last = min(first + block, length.keys - length.old_keys);
    }
    float scale;
    if (first >= 0) {
      const float top = rows.largest(first, last);
      scale = top == 0.0f ? 1.0f : fmaxf(HEADROOM * top / 448.0f, 0x1p-126f);
      if (token == first && lane == 0) st_global(scale_at, float_as_u32(scale));
    } else {
      scale = ld_global<float>(scale_at);
    }
    const float inverse = 1.0f / scale;
    char* out = static_cast<char*>(of_values ? p.v_cache : p.k_cache) + outer * to.batch + kv_head * to.head + slot * to.seq;
    [[maybe_unused]] float squares = 0.0f;
    for (int pair = lane; pair < HEAD_DIM / 2; pair += 32) {
      const u32 two = cvt_e4m3x2(rows.load(token, 2 * pair) * inverse, rows.load(token, 2 * pair + 1) * inverse);
      st_global(out + 2 * pair, u16(two));
      if constexpr (READS_NORMS) {
        const u32 wide = cvt_f16x2_e4m3x2(u16(two));
        const float low = cvt_f32_f16(u16(wide)), high = cvt_f32_f16(u16(wide >> 16));
        squares = fmaf(low, low, fmaf(high, high, squares));
      }
    }
    if constexpr (READS_NORMS) {
      const float norm = scale * square_root(warp_sum(squares));
      u32* largest = reinterpret_cast<u32*>(p.key_norms + batch * p.kv_heads + kv_head);
      if (!of_values && lane == 0) red_max_u32(largest, float_as_u32(norm));
    }
  }
}
