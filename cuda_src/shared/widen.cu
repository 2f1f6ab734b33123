// widen_e4m3: rows of e4m3 times their scales as 16-bit elements, for attention with 16-bit queries and for cufa.dequantize.
// cufa/run/cpu/quantize.py has the same arithmetic. A thread has 16 columns of a row.
#include "primitives/float8.cuh"
#include "shared/element.cuh"

using Element = SixteenBit<BFLOAT16>;
constexpr u32 UNITS = HEAD_DIM / 16;  // units of 16 columns in a row
static_assert(HEAD_DIM % 16 == 0, "HEAD_DIM: rows are whole units of 16 columns");

// Members of 8 bytes, which cufa/kernels/widen.py lists in this order.
struct WidenParams {
  const char* x;  // (batch, heads, seqlen, HEAD_DIM)
  char* out;      // the same axes, contiguous
  const float* scale;
  i64 heads, seqlen;
  i64 x_batch, x_head, x_row;            // bytes from one to the next
  i64 scale_batch, scale_head, block;    // elements from one to the next; tokens that share a scale
};

// Grid: (ceil(seqlen * UNITS / 256), batch * heads).
KERNEL __launch_bounds__(256) widen_e4m3(const __grid_constant__ WidenParams p) {
  const u32 unit = blockIdx.x * 256 + threadIdx.x, token = unit / UNITS, column = unit % UNITS * 16;
  if (token >= u32(p.seqlen)) return;
  const u32 batch = blockIdx.y / u32(p.heads), head = blockIdx.y % u32(p.heads);
  const float by = ld_global<float>(p.scale + batch * p.scale_batch + head * p.scale_head + token / u32(p.block));
  const char* row = p.x + batch * p.x_batch + head * p.x_head + token * p.x_row + column;
  u32 words[4];
  if constexpr (ALIGNED) {
    const vec4 four = ld_global<vec4>(row);
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i] |= u32(ld_global<unsigned char>(row + 4 * i + j)) << 8 * j;
    }
  }
  u32 wide[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 pair = cvt_f16x2_e4m3x2(u16(words[i / 2] >> i % 2 * 16));
    wide[i] = Element::pack(cvt_f32_f16(u16(pair)) * by, cvt_f32_f16(u16(pair >> 16)) * by);
  }
  char* to = p.out + ((i64(blockIdx.y) * p.seqlen + token) * HEAD_DIM + column) * 2;
  st_global(to, vec4{wide[0], wide[1], wide[2], wide[3]});
  st_global(to + 16, vec4{wide[4], wide[5], wide[6], wide[7]});
}
