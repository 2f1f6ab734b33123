// The attention of packed query rows to the tiles of one ring. The query heads of a query group, times the query tokens, are the
// rows of one product: each byte of the cache is loaded once for all rows.
//
// e4m3 elements are widened to float16 after ldmatrix, without shuffles: ldmatrix treats a pair of e4m3 bytes as one 16-bit
// element. The order of k in a product is free: Q is loaded in the order that K then has, four consecutive columns per lane. With
// V, transposed, a lane gets two columns of two keys: operands of two products, one for even columns and one for odd columns.
//
// KEY_SCALES: a score is multiplied by its key's scale, a weight by its value's scale / v_unit. v_unit is the least power of two
// that no value scale of the ring has exceeded: weights stay in float16's range. merge_warps() multiplies O by v_unit.
//
// Row maxima are computed online or fixed beforehand (decode/maximum.cuh).
//
// bfloat16 queries over an e4m3 cache become float16, whose range is smaller: each quad of lanes multiplies its rows by the power
// of two that brings their largest element to 2^14 ... 2^15, and divides its softmax scale by this power.
#pragma once
#include "primitives/float8.cuh"
#include "decode/tma.cuh"
#include "mma/fragments.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/score.cuh"
#include "shared/score_function.cuh"
#include "shared/softcap.cuh"
#include "shared/tree.cuh"

constexpr int WARP_ROWS = Br / ROW_WARPS;
constexpr int M_TILES = WARP_ROWS / 16;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;
constexpr int S_TILES = RING_KEYS / 8;
constexpr int O_TILES = V_DIM / 8;
using Product = SixteenBit<BFLOAT16 && !FP8_CACHE>;  // the element of products: an e4m3 cache is widened to float16
constexpr bool NARROWS_QUERIES = FP8_CACHE && BFLOAT16;
using KernelParams = typename Choose<SCORE, ScoredDecodeParams, DecodeParams>::type;
enum MaximumKind { ONLINE, BOUND, GIVEN };  // of SOFTMAX_MAX
static_assert(!TREE || MASK == MASK_CAUSAL, "TREE: several query tokens, which see all earlier keys");
static_assert(!SCORE || SOFTMAX_MAX != BOUND, "SCORE: norms of queries and keys do not bound a changed score");
static_assert(!INVARIANT || SOFTMAX_MAX == ONLINE, "INVARIANT: a row out of a fixed range would change its warp's other rows");
static_assert(Br % (16 * ROW_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(RING_KEYS % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % (FP8_CACHE ? 16 : 8) == 0 && HEAD_DIM <= 256,
              "HEAD_DIM is a multiple of 8 (FP8_CACHE: of 16), at most 256");
static_assert(V_DIM % 8 == 0 && V_DIM <= 256, "V_DIM is a multiple of 8, at most 256");
static_assert(!FP8_CACHE || V_DIM == HEAD_DIM, "keys and values of an e4m3 cache are equally wide");

// Q stays in registers if O, S and Q leave 80 registers for all other values.
constexpr int REGISTERS = 65536 / (NUM_THREADS * BLOCKS_PER_SM), REGISTER_LIMIT = REGISTERS < 255 ? REGISTERS : 255;
constexpr bool Q_IN_REGISTERS = M_TILES * 4 * (K_STEPS + S_TILES + O_TILES) + 80 <= REGISTER_LIMIT;

// The whole block copies the packed rows of a work item to shared memory. Row r is token r % tokens of the query group's head
// r / tokens. Rows past the last one become zeros.
DEVICE void copy_queries(const DecodeParams& p, const Span& span, u32 Q_smem, int thread) {
  constexpr int ROW_BYTES = HEAD_DIM * 2, UNITS = ROW_BYTES / ALIGNMENT;
  const int rows = p.group_size * p.tokens;
  const char* Q = static_cast<const char*>(p.q) +
                  2 * (span.batch * p.q_stride.batch + span.kv_head * p.group_size * p.q_stride.head);
#pragma unroll 1
  for (int i = thread; i < Br * UNITS; i += NUM_THREADS) {
    const int row = i / UNITS, offset = i % UNITS * ALIGNMENT, packed = span.row_block * Br + row;
    const int head = SEVERAL_TOKENS ? packed / p.tokens : packed, token = SEVERAL_TOKENS ? packed % p.tokens : 0;
    copy_unit_async<ALIGNMENT>(Q_smem + row * Q_PITCH + offset,
                               Q + 2 * (head * p.q_stride.head + token * p.q_stride.seq) + offset, packed < rows);
  }
}

using NewTokens = WarpTree<TREE, 16>;

struct TileAttention {
  float O[M_TILES][O_TILES][4];
  // INVARIANT: no slack. With slack, a warp rescales all its rows when one row exceeds the slack: rows depend on each other.
  OnlineSoftmax<2 * M_TILES, INVARIANT ? 0 : 8> softmax;
  u32 Q[M_TILES][K_STEPS][4];  // read if Q_IN_REGISTERS
  int place[2 * M_TILES];      // key position of each row's query token; unset if MASK_FULL without ALIBI and SCORE
  int exempt_end[2 * M_TILES]; // EXEMPT_BY_SEQUENCE: Exempt::end()
  int chunk_first[2 * M_TILES];  // CHUNKED: position of the first key of the token's chunk, minus the token's
  u64 tree[2 * M_TILES];       // TREE: bit i: the row's token sees new token i
  float slope[2 * M_TILES];    // ALIBI: slope of each row's head, in log2 units
  float scale_log2;            // softmax scale in log2 units, times k_scale; SOFTCAP: the cap in log2 units
  float softcap;               // SOFTCAP: softmax scale / cap * 2 log2(e), times k_scale
  float v_unit;                // KEY_SCALES: O is stored in multiples of v_unit
  u32 scales;                  // KEY_SCALES: shared memory of the tile's scales; set before visit()
  float q_factor;              // NARROWS_QUERIES: a power of two that multiplies this lane's rows of Q
  bool online;                 // row maxima are computed tile by tile; else they are fixed
  float key_norm;              // READS_NORMS: upper bound of |k|
  float product_scale;         // SCORE, FP8_CACHE: k_scale
  int batch, head[2 * M_TILES];  // SCORE: the sequence, and the query head of each row

  DEVICE void fix_maxima(const DecodeParams& p, const Span& span, u32 Q_lane, int first_row, int lane);
  DEVICE bool out_of_range(int first_row, int rows, int lane) const;

  DEVICE void start(const DecodeParams& p, const Span& span, const NewTokens& new_tokens, u32 Q_lane, int first_row, int lane) {
    softmax.reset();
    online = true;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
      for (int n = 0; n < O_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[i][n][e] = 0.0f;
      }
    }
    scale_log2 = p.scale_log2;
    softcap = p.softcap;
    if constexpr (FP8_CACHE) {
      float k_scale = KEY_SCALES ? 1.0f : ld_global<float>(p.k_scale + span.kv_head);
      if constexpr (KEY_SCALES) v_unit = 0x1p-126f;  // the least normal number: its inverse is finite
      if constexpr (NARROWS_QUERIES) k_scale *= fit_queries(Q_lane);
      product_scale = k_scale;
      if constexpr (!SCORE) softcap *= k_scale;
      // A scale of 0 would turn the mask's -inf into NaN; the smallest normal float gives the same weights.
      if constexpr (!SOFTCAP && !SCORE) scale_log2 = fmaxf(scale_log2 * k_scale, 0x1p-126f);
    }
    if constexpr (SCORE) batch = span.batch;
    if constexpr (MASK != MASK_FULL || ALIBI || SCORE) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const int packed = span.row_block * Br + first_row + r * 8 + lane / 4;
        const int token = SEVERAL_TOKENS ? packed % p.tokens : 0;
        place[r] = span.length.keys - p.tokens + token;
        if constexpr (EXEMPT_BY_SEQUENCE) exempt_end[r] = Exempt(p, span.batch).end(place[r], span.length.keys);
        if constexpr (CHUNKED) chunk_first[r] = -(place[r] % p.chunk);
        if constexpr (SCORE) {
          head[r] = span.kv_head * p.group_size + min(packed / p.tokens, p.group_size - 1);
        }
        if constexpr (ALIBI) {  // rows past the last one take the last head's slope
          const int head = min(SEVERAL_TOKENS ? packed / p.tokens : packed, p.group_size - 1);
          slope[r] = LOG2_E * load_slope(p.alibi_slopes + i64(span.batch) * p.alibi_stride +
                                         span.kv_head * p.group_size + head);
        }
      }
    }
    if constexpr (TREE) {
      int token[2 * M_TILES];
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) token[r] = place[r] - (span.length.keys - p.tokens);
      new_tokens.of(tree, token, lane);
    }
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) load_q(Q, k, Q_lane);
    }
  }

  // Chooses q_factor for the lane's rows of Q, and returns its inverse.
  DEVICE float fit_queries(u32 Q_lane) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        const vec2 four = ld_shared_vec2(Q_lane + i * 8 * Q_PITCH + k * 32);
        largest = fmaxf(largest, fmaxf(fabsf(cvt_f32_bf16(u16(four.x))), fabsf(cvt_f32_bf16(u16(four.x >> 16)))));
        largest = fmaxf(largest, fmaxf(fabsf(cvt_f32_bf16(u16(four.y))), fabsf(cvt_f32_bf16(u16(four.y >> 16)))));
      }
    }
    // Biased float32 exponent of the largest element, clamped: the factor and its inverse are normal numbers. 141 = 127 + 14.
    const int exponent = min(max(int(float_as_u32(quad_max(largest)) >> 23), 15), 254);
    q_factor = u32_as_float(u32(127 + 141 - exponent) << 23);
    return u32_as_float(u32(127 - 141 + exponent) << 23);
  }

  // Loads the A fragments of k16 step `k` for all 16-row tiles.
  template <int STEPS>
  DEVICE void load_q(u32 (&q)[M_TILES][STEPS][4], int k, u32 Q_lane) const {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      u32(&a)[4] = q[i][STEPS == 1 ? 0 : k];
      if constexpr (FP8_CACHE) {  // columns 4t ... 4t + 3 of rows g and g + 8
        const vec2 upper = ld_shared_vec2(Q_lane + i * 16 * Q_PITCH + k * 32);
        const vec2 lower = ld_shared_vec2(Q_lane + (i * 16 + 8) * Q_PITCH + k * 32);
        a[0] = as_half(upper.x);
        a[1] = as_half(lower.x);
        a[2] = as_half(upper.y);
        a[3] = as_half(lower.y);
      } else {
        ldmatrix_x4(a, Q_lane + i * 16 * Q_PITCH + k * 32);
      }
    }
  }

  // The lane's offset in a Q tile for load_q().
  static DEVICE u32 q_lane_offset(int lane) {
    if constexpr (FP8_CACHE) return lane / 4 * Q_PITCH + lane % 4 * 8;
    return lane_offset_rows_first<Q_PITCH>(lane);
  }

  DEVICE u32 as_half(u32 pair) const {
    if constexpr (!BFLOAT16) return pair;
    return cvt_f16x2_satfinite(cvt_f32_bf16(u16(pair)) * q_factor, cvt_f32_bf16(u16(pair >> 16)) * q_factor);
  }

  // One tile of a ring, as in FlashAttention-2. All tiles are masked: eight comparisons per row cost less than the instruction
  // cache misses of an unmasked copy of the loop. `key`: position of the tile's first key; `keys`: length of the sequence.
  DEVICE void visit(const DecodeParams& p, u32 K_smem, u32 Q_lane, int key, int keys, int lane) {
    Band<BAND_KIND> mask = band_of(p, keys);
    const u32 V_smem = K_smem + KV_TILE_BYTES;
    float S[M_TILES][S_TILES][4] = {};
    if constexpr (FP8_CACHE) {
      scores_e4m3(S, K_smem, Q_lane, lane);
    } else {
      const u32 K_lane = lane_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        u32 Q_step[M_TILES][1][4];
        if constexpr (!Q_IN_REGISTERS) load_q(Q_step, k, Q_lane);
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
          u32 B[4];
          ldmatrix_x4(B, unit_address(K_smem + n / 2 * GROUP_BYTES, K_lane, 2 * k));
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
            const u32(&A)[4] = Q_IN_REGISTERS ? Q[i][k] : Q_step[i][0];
            mma_m16n8k16<Product>(S[i][n], A, B[0], B[1]);
            mma_m16n8k16<Product>(S[i][n + 1], A, B[2], B[3]);
          }
        }
      }
    }
    mma_fence();
    const auto scores = fragment_view(S);
    [[maybe_unused]] float v_scale[2 * S_TILES];  // KEY_SCALES: value scales of this lane's columns / v_unit
    if constexpr (KEY_SCALES) scale_keys(S, v_scale, scales + lane % 4 * 8);
    if constexpr (SCORE) change_scores(static_cast<const KernelParams&>(p), scores, key + scores.lane_column(lane), keys);
    cap_scores<SOFTCAP>(scores, softcap);
    if constexpr (ALIBI) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const Alibi alibi(slope[r], place[r]);
        const float distance = float(place[r] - key - scores.lane_column(lane));
        scores.for_each_in_row(r, [&](int column, float& s) { s = alibi.changed(s, scale_log2, distance, -column); });
      }
    }
    if (TREE && key + RING_KEYS > keys - p.tokens) {  // new tokens in this tile
      const int first = key + scores.lane_column(lane) - (keys - p.tokens);
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        scores.for_each_in_row(r, [&](int column, float& s) {
          const int token = first + column;
          if (token >= 0 && token < 32 && (tree[r] >> token & 1) == 0) s = NEG_INF;
        });
      }
    }
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      if constexpr (CHUNKED) mask.first = chunk_first[r];
      const VisibleColumns<BAND_KIND, RIGHT_MASKED> visible(mask, MASK == MASK_FULL ? 0 : place[r], key,
                                                       scores.lane_column(lane));
      int first_keys = 0;  // MASK_SETS: columns before this one are visible even outside the band
      if constexpr (EXEMPT_BY_SEQUENCE) {
        first_keys = exempt_end[r] - key - scores.lane_column(lane);
      } else if constexpr (MASK == MASK_SETS) {
        first_keys = max(min(p.keep, place[r] + 1), min(p.prefix, keys)) - key - scores.lane_column(lane);
      }
      scores.for_each_in_row(r, [&](int column, float& s) {
        s = visible(column) || (MASK == MASK_SETS && column < first_keys) ? s : NEG_INF;
        m_tile[r] = column == 0 ? s : fmaxf(m_tile[r], s);
      });
      if constexpr (SOFTMAX_MAX == ONLINE) m_tile[r] = quad_max(m_tile[r]);
    }
    if constexpr (SOFTMAX_MAX == ONLINE) {
      if (softmax.raise_max(m_tile, softmax_scale(*this), alpha)) scale_rows(O, alpha);
    } else if (online) {
      if (softmax.raise_max_by_lanes(m_tile, softmax_scale(*this), alpha)) scale_rows(O, alpha);
    }

#pragma unroll
    for (int k = 0; k < RING_KEYS / 16; ++k) {
      exponentials<2>(scores, 2 * k, softmax, softmax_scale(*this));
      u32 P[M_TILES][4];
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if constexpr (KEY_SCALES) {
#pragma unroll
          for (int e = 0; e < 8; ++e) S[i][2 * k + e / 4][e % 4] *= v_scale[4 * k + e / 4 * 2 + e % 2];
        }
#pragma unroll
        for (int h = 0; h < 4; ++h) P[i][h] = operand_pair<Product>(scores, i, k, h);
      }
      if constexpr (FP8_CACHE) {
        accumulate_e4m3(P, V_smem + k * GROUP_BYTES, lane);
      } else {
        accumulate(P, V_smem + k * GROUP_BYTES, lane_address(lane % 16, lane / 16));
      }
    }
    mma_fence();
  }

  // SCORE: applies the score function, row by row, because rows differ in their heads. `first`: position of the lane's first key.
  template <typename View>
  DEVICE void change_scores(const KernelParams& p, View S, int first, int keys) const {
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) {
      const int delta = keys - p.tokens, token = place[r] - delta;
      const ScoreFunction<KernelParams> function(p, batch, head[r], delta);
      const auto row = function.row(token, float(token));
      S.for_each_in_row(r, [&](int column, float& s) {
        const auto of_key = function.column(first + column, float(first + column));
        s = function.template value<false>(FP8_CACHE ? s * product_scale : s, row, of_key);
      });
    }
  }

  // KEY_SCALES: multiplies scores by key scales. Loads value scales, raises v_unit if one exceeds it, and divides them by v_unit.
  DEVICE void scale_keys(float (&S)[M_TILES][S_TILES][4], float (&v_scale)[2 * S_TILES], u32 scales) {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const vec2 k = ld_shared_vec2(scales + n * 32), v = ld_shared_vec2(scales + RING_KEYS * 4 + n * 32);
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[i][n][e] *= u32_as_float(e % 2 ? k.y : k.x);
      }
      v_scale[2 * n] = u32_as_float(v.x);
      v_scale[2 * n + 1] = u32_as_float(v.y);
      largest = fmaxf(largest, fmaxf(v_scale[2 * n], v_scale[2 * n + 1]));
    }
    largest = quad_max(largest);  // a quad has all columns: the same in every lane
    if (largest > v_unit) {
      const float unit = u32_as_float((float_as_u32(largest) + 0x7fffff) & 0x7f800000), factor = v_unit / unit;
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O[i][n][e] *= factor;
        }
      }
      v_unit = unit;
    }
    const float inverse = 1.0f / v_unit;
#pragma unroll
    for (int i = 0; i < 2 * S_TILES; ++i) v_scale[i] *= inverse;
  }

  // O += P V for 16 keys.
  DEVICE void accumulate(const u32 (&P)[M_TILES][4], u32 V_smem, u32 V_lane) {
#pragma unroll
    for (int n = 0; n < O_TILES; n += 2) {
      u32 B[4];
      if (n + 1 < O_TILES) {
        ldmatrix_x4_trans(B, unit_address(V_smem, V_lane, n));
      } else {
        u32 half[2];
        ldmatrix_x2_trans(half, unit_address(V_smem, V_lane, n));
        B[0] = half[0];
        B[1] = half[1];
      }
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        mma_m16n8k16<Product>(O[i][n], P[i], B[0], B[1]);
        if (n + 1 < O_TILES) mma_m16n8k16<Product>(O[i][n + 1], P[i], B[2], B[3]);
      }
    }
  }

  // S = Q K^T. One 8x8 matrix of ldmatrix holds a whole k16 step of eight e4m3 keys.
  DEVICE void scores_e4m3(float (&S)[M_TILES][S_TILES][4], u32 K_smem, u32 Q_lane, int lane) {
#pragma unroll
    for (int n = 0; n < S_TILES; n += 2) {
      const u32 group = K_smem + n / 2 * GROUP_BYTES;
#pragma unroll
      for (int k = 0; k < K_STEPS; k += 2) {
        u32 B[4];  // keys 0-7: steps k and k + 1; keys 8-15: steps k and k + 1
        if (k + 1 < K_STEPS) {
          ldmatrix_x4(B, unit_address(group, lane_address(lane / 16 * 8 + lane % 8, lane / 8 % 2), k));
        } else {
          u32 half[2];
          ldmatrix_x2(half, unit_address(group, lane_address(lane % 16, 0), k));
          B[0] = half[0];
          B[2] = half[1];
        }
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          if (k + x < K_STEPS) {
            u32 Q_step[M_TILES][1][4];
            if constexpr (!Q_IN_REGISTERS) load_q(Q_step, k + x, Q_lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const u32 bytes = B[half * 2 + x];
              const u32 b0 = cvt_f16x2_e4m3x2(u16(bytes)), b1 = cvt_f16x2_e4m3x2(u16(bytes >> 16));
#pragma unroll
              for (int i = 0; i < M_TILES; ++i) {
                const u32(&A)[4] = Q_IN_REGISTERS ? Q[i][k + x] : Q_step[i][0];
                mma_m16n8k16_f16(S[i][n + half], A, b0, b1);
              }
            }
          }
        }
      }
    }
  }

  // O += P V for 16 keys. Of each 16 columns, tile n of O holds the even columns and tile n + 1 the odd ones.
  DEVICE void accumulate_e4m3(const u32 (&P)[M_TILES][4], u32 V_smem, int lane) {
#pragma unroll
    for (int n = 0; n < O_TILES; n += 4) {
      u32 B[4];  // columns 0-15: keys 0-7 and 8-15; columns 16-31: keys 0-7 and 8-15
      if (n + 2 < O_TILES) {
        ldmatrix_x4_trans(B, unit_address(V_smem, lane_address(lane % 16, lane / 16), n / 2));
      } else {
        u32 half[2];
        ldmatrix_x2_trans(half, unit_address(V_smem, lane_address(lane % 16, 0), n / 2));
        B[0] = half[0];
        B[1] = half[1];
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if (n + 2 * x < O_TILES) {
          // The bytes of a register: two columns of one key, then the same two columns of the next key.
          const u32 lo = byte_permute(B[2 * x], 0, 0x3120), hi = byte_permute(B[2 * x + 1], 0, 0x3120);
          const u32 even0 = cvt_f16x2_e4m3x2(u16(lo)), even1 = cvt_f16x2_e4m3x2(u16(hi));
          const u32 odd0 = cvt_f16x2_e4m3x2(u16(lo >> 16)), odd1 = cvt_f16x2_e4m3x2(u16(hi >> 16));
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
            mma_m16n8k16_f16(O[i][n + 2 * x], P[i], even0, even1);
            mma_m16n8k16_f16(O[i][n + 2 * x + 1], P[i], odd0, odd1);
          }
        }
      }
    }
  }
};
