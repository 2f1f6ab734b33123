// A maximum of each row that is fixed before its first score (SOFTMAX_MAX; FlashDecoding++, Hong et al., arXiv 2311.01282,
// section 3): weights are 2^(s - m), no tile rescales O, and all rings and splits of a row subtract the same m.
//
//   BOUND   m = U - MOST_BITS, where U = |q| max|k| scale is at least every score (Cauchy-Schwarz); with a soft cap U = cap.
//           ALiBi adds |slope| * keys to U. If U > GATE, a row of scores near -U could sum to less than LEAST_SUM: the warp
//           computes maxima online.
//   GIVEN   m is the caller's number, one for all heads or one per head.
//
// For any m: if a ring's sum l of a row lies in LEAST_SUM ... MOST_SUM, its result is right: no weight has overflowed, and
// weights that underflowed are below rounding. Else (also for NaN) the ring reads its keys again with online maxima. Each partial
// result has its own m, so merges take both kinds. cufa/problem/scores.py has the same numbers.
#pragma once
#include "decode/tile.cuh"
#include "primitives/maximum.cuh"
#include "primitives/semaphore.cuh"

constexpr bool HALF_WEIGHTS = !Product::IS_BFLOAT16;  // weights lie in 2^-24 ... 2^16; else they have float32's range
constexpr float MOST_BITS = HALF_WEIGHTS ? 7.0f : 32.0f, GATE = HALF_WEIGHTS ? 5.5f : 61.0f;
constexpr float LEAST_SUM = HALF_WEIGHTS ? 0x1p-4f : 0x1p-90f, MOST_SUM = HALF_WEIGHTS ? 0x1p15f : 0x1p64f;
constexpr bool READS_NORMS = SOFTMAX_MAX == BOUND && !SOFTCAP, RAISES_NORMS = READS_NORMS && APPEND;

DEVICE float square_root(float x) { return ex2(0.5f * lg2(x)); }

DEVICE float* key_norm_of(const DecodeParams& p, const Span& span) {
  return p.key_norms + i64(span.batch) * p.kv_heads + span.kv_head;
}

// An upper bound of |k| over the sequence's keys in this head, appended keys included. While one block raises the stored bound,
// others read it: each block takes the maximum with the norms of the appended keys, so all blocks get the same bound.
DEVICE float largest_key(const DecodeParams& p, const Span& span, int lane) {
  float squares = 0.0f;
  if constexpr (RAISES_NORMS) {
    const char* K = static_cast<const char*>(p.k_new) +
                    KV_ITEM * (span.batch * p.k_new_stride.batch + span.kv_head * p.k_new_stride.head);
#pragma unroll 1
    for (int token = 0; token < span.length.keys - span.length.old_keys; ++token) {
      float own = 0.0f;
      for (int pair = lane; pair < HEAD_DIM / 2; pair += 32) {
        const char* two = K + KV_ITEM * (token * p.k_new_stride.seq + 2 * pair);
        u32 bits;
        if constexpr (FP8_CACHE) {
          bits = cvt_f16x2_e4m3x2(ld_global<u16>(two));
        } else {
          bits = ld_global<u16>(two) | u32(ld_global<u16>(two + 2)) << 16;
        }
        const float low = Product::widen(u16(bits)), high = Product::widen(u16(bits >> 16));
        own = fmaf(low, low, fmaf(high, high, own));
      }
      squares = fmaxf(squares, warp_sum(own));
    }
  }
  float largest = square_root(squares);
  if constexpr (FP8_CACHE && !KEY_SCALES) largest *= ld_global<float>(p.k_scale + span.kv_head);
  float* norm = key_norm_of(p, span);
  if constexpr (RAISES_NORMS) return fmaxf(u32_as_float(ld_acquire_gpu(reinterpret_cast<u32*>(norm))), largest);
  return ld_global<float>(norm);
}

// Sets m of each row, or keeps the warp's maxima online if a bound exceeds GATE.
DEVICE void TileAttention::fix_maxima(const DecodeParams& p, const Span& span, u32 Q_lane, int first_row, int lane) {
  float bound[2 * M_TILES] = {};
  if constexpr (READS_NORMS) {
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      u32 Q_step[M_TILES][1][4];
      if constexpr (!Q_IN_REGISTERS) load_q(Q_step, k, Q_lane);
#pragma unroll
      for (int i = 0; i < 4 * M_TILES; ++i) {
        const u32 two = Q_IN_REGISTERS ? Q[i / 4][k][i % 4] : Q_step[i / 4][0][i % 4];
        const float low = Product::widen(u16(two)), high = Product::widen(u16(two >> 16));
        float& squares = bound[i / 4 * 2 + i % 2];
        squares = fmaf(low, low, fmaf(high, high, squares));
      }
    }
    key_norm = largest_key(p, span, lane);
    float factor = p.scale_log2 * key_norm;
    if constexpr (NARROWS_QUERIES) factor *= 1.0f / q_factor;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) bound[r] = square_root(quad_sum(bound[r])) * factor;
  }
  bool fits = true;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    if (SOFTMAX_MAX == BOUND && SOFTCAP) bound[r] = p.scale_log2;  // the cap
    if constexpr (ALIBI) bound[r] += fabsf(slope[r]) * float(span.length.keys);
    fits = fits && bound[r] <= GATE;  // false for NaN
    softmax.m_scaled[r] = bound[r] - MOST_BITS;
    if constexpr (SOFTMAX_MAX == GIVEN) {
      const int packed = min(span.row_block * Br + first_row + r * 8 + lane / 4, p.group_size * p.tokens - 1);
      const int head = span.kv_head * p.group_size + (SEVERAL_TOKENS ? packed / p.tokens : packed);
      softmax.m_scaled[r] = LOG2_E * (p.softmax_max == nullptr ? p.fixed_max : ld_global<float>(p.softmax_max + head));
    }
  }
  online = warp_any(!fits);
  if (online) softmax.reset();
}

// Whether a row of the warp with a fixed maximum has a sum outside LEAST_SUM ... MOST_SUM.
DEVICE bool TileAttention::out_of_range(int first_row, int rows, int lane) const {
  bool wrong = false;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const float sum = quad_sum(softmax.l[r]);
    wrong |= first_row + r * 8 + lane / 4 < rows && !(sum >= LEAST_SUM && sum <= MOST_SUM);
  }
  return warp_any(!online && wrong);
}
