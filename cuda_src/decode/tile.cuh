// Attention of packed query rows over the tiles of one ring. The query heads that share a key/value head, times the
// query tokens, are the rows of one product: every byte of the cache is loaded once for all of them, whatever the group.
//
// A cache of e4m3 becomes float16 between shared memory and the product, with no shuffle: ldmatrix hands out pairs of
// bytes where it would hand out a 16-bit element, and since a product does not care in which order its k runs, the
// queries simply take the same order (K: four consecutive columns per lane). For V, transposed, a lane gets two columns
// of two keys; byte by byte they are operands of two products, one for even and one for odd columns.
#pragma once
#include "primitives/float8.cuh"
#include "decode/tma.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"

constexpr int WARP_ROWS = Br / ROW_WARPS;
constexpr int M_TILES = WARP_ROWS / 16;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;
constexpr int S_TILES = RING_KEYS / 8;
constexpr int O_TILES = HEAD_DIM / 8;
using Product = SixteenBit<BFLOAT16 && !FP8_CACHE>;  // an fp8 cache is widened to float16
static_assert(Br % (16 * ROW_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(RING_KEYS % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % (FP8_CACHE ? 16 : 8) == 0 && HEAD_DIM <= 256, "head_dim");

// Q stays in registers where O, S and Q together leave 80 for the rest.
constexpr int REGISTERS = 65536 / (NUM_THREADS * BLOCKS_PER_SM), REGISTER_LIMIT = REGISTERS < 255 ? REGISTERS : 255;
constexpr bool Q_IN_REGISTERS = M_TILES * 4 * (K_STEPS + S_TILES + O_TILES) + 80 <= REGISTER_LIMIT;

// The packed rows of one item to shared memory, by the whole block: row r is token r % tokens of the r / tokens'th head
// of the group. Rows past the last are zeros.
DEVICE void copy_queries(const DecodeParams& p, const Piece& piece, u32 Q_smem, int thread) {
  constexpr int ROW_BYTES = HEAD_DIM * 2, UNITS = ROW_BYTES / ALIGNMENT;
  const int rows = p.group_size * p.tokens;
  const char* Q = static_cast<const char*>(p.q) +
                  2 * (piece.batch * p.q_stride.batch + piece.kv_head * p.group_size * p.q_stride.head);
#pragma unroll 1
  for (int i = thread; i < Br * UNITS; i += NUM_THREADS) {
    const int row = i / UNITS, offset = i % UNITS * ALIGNMENT, packed = piece.row_block * Br + row;
    const int head = SEVERAL_TOKENS ? packed / p.tokens : packed, token = SEVERAL_TOKENS ? packed % p.tokens : 0;
    copy_unit_async<ALIGNMENT>(Q_smem + row * Q_PITCH + offset,
                               Q + 2 * (head * p.q_stride.head + token * p.q_stride.seq) + offset, packed < rows);
  }
}

struct TileAttention {
  float O[M_TILES][O_TILES][4];
  OnlineSoftmax<2 * M_TILES> softmax;
  u32 Q[M_TILES][K_STEPS][4];  // used when Q_IN_REGISTERS
  int place[2 * M_TILES];      // of the query tokens of this lane's rows in their sequence (not MASK_FULL, or ALIBI)
  float slope[2 * M_TILES];    // of these rows' heads, in units of log2 (ALIBI)
  float scale_log2;            // softmax scale in log2 units, k_scale included; with SOFTCAP the cap in log2 units
  float softcap;               // softmax scale over cap times 2 log2(e), k_scale included (SOFTCAP)

  DEVICE void start(const DecodeParams& p, const Piece& piece, u32 Q_lane, int first_row, int lane) {
    softmax.reset();
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
      const float k_scale = ld_global<float>(p.k_scale + piece.kv_head);
      softcap *= k_scale;
      // Never 0, which would turn the mask's -inf into NaN: the smallest normal float gives the same weights.
      if constexpr (!SOFTCAP) scale_log2 = fmaxf(scale_log2 * k_scale, 0x1p-126f);
    }
    if constexpr (MASK != MASK_FULL || ALIBI) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const int packed = piece.row_block * Br + first_row + r * 8 + lane / 4;
        const int token = SEVERAL_TOKENS ? packed % p.tokens : 0;
        place[r] = piece.length.keys - p.tokens + token;
        if constexpr (ALIBI) {  // rows past the last have the last head's
          const int head = min(SEVERAL_TOKENS ? packed / p.tokens : packed, p.group_size - 1);
          constexpr float LOG2_E = 1.44269504088896341f;
          slope[r] = LOG2_E * ld_global<float>(p.alibi_slopes + i64(piece.batch) * p.alibi_stride +
                                               piece.kv_head * p.group_size + head);
        }
      }
    }
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) load_q(Q, k, Q_lane);
    }
  }

  // The k16 step `k` of all row tiles.
  template <int STEPS>
  DEVICE static void load_q(u32 (&q)[M_TILES][STEPS][4], int k, u32 Q_lane) {
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

  // This lane's address of a Q tile, as load_q wants it.
  static DEVICE u32 q_lane_offset(int lane) {
    if constexpr (FP8_CACHE) return lane / 4 * Q_PITCH + lane % 4 * 8;
    return lane_offset_rows_first<Q_PITCH>(lane);
  }

  static DEVICE u32 as_half(u32 pair) {
    if constexpr (!BFLOAT16) return pair;
    return cvt_f16x2_satfinite(cvt_f32_bf16(u16(pair)), cvt_f32_bf16(u16(pair >> 16)));
  }

  // One tile of a ring: Flash-Decoding is FlashAttention-2 over part of the keys. Every tile is masked: eight comparisons
  // a row, where a second copy of the loop would have to be fetched, cold, from memory.
  DEVICE void visit(const DecodeParams& p, u32 K_smem, u32 Q_lane, int key, int keys, int lane) {
    constexpr MaskKind BAND = MASK == MASK_SETS ? MASK_BAND : MASK_KIND;
    const Band<BAND> mask = {keys, keys, -p.left, 0};  // rows counted as keys: a token sees its own
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
            Product::mma(S[i][n], A, B[0], B[1]);
            Product::mma(S[i][n + 1], A, B[2], B[3]);
          }
        }
      }
    }
    mma_fence();
    const auto scores = fragment_view(S);
    cap_scores<SOFTCAP>(scores, softcap);
    if constexpr (ALIBI) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const Alibi alibi(slope[r], place[r]);
        const float distance = float(place[r] - key - scores.lane_column(lane));
        scores.for_each_in_row(r, [&](int column, float& s) { s = alibi.changed(s, scale_log2, distance, -column); });
      }
    }
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      const VisibleColumns<BAND, RIGHT_MASKED> visible(mask, MASK == MASK_FULL ? 0 : place[r], key,
                                                       scores.lane_column(lane));
      int first_keys = 0;  // MASK_SETS: columns before this one are seen whatever the band
      if constexpr (MASK == MASK_SETS) {
        first_keys = max(min(p.keep, place[r] + 1), min(p.prefix, keys)) - key - scores.lane_column(lane);
      }
      scores.for_each_in_row(r, [&](int column, float& s) {
        s = visible(column) || (MASK == MASK_SETS && column < first_keys) ? s : NEG_INF;
        m_tile[r] = column == 0 ? s : fmaxf(m_tile[r], s);
      });
      m_tile[r] = quad_max(m_tile[r]);
    }
    if (softmax.raise_max(m_tile, softmax_scale(*this), alpha)) scale_rows(O, alpha);

#pragma unroll
    for (int k = 0; k < RING_KEYS / 16; ++k) {
      exponentials<2>(scores, 2 * k, softmax, softmax_scale(*this));
      u32 P[M_TILES][4];
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
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
        Product::mma(O[i][n], P[i], B[0], B[1]);
        if (n + 1 < O_TILES) Product::mma(O[i][n + 1], P[i], B[2], B[3]);
      }
    }
  }

  // S = Q K^T: an 8x8 matrix of ldmatrix is eight keys and a whole k16 step.
  DEVICE void scores_e4m3(float (&S)[M_TILES][S_TILES][4], u32 K_smem, u32 Q_lane, int lane) {
#pragma unroll
    for (int n = 0; n < S_TILES; n += 2) {
      const u32 group = K_smem + n / 2 * GROUP_BYTES;
#pragma unroll
      for (int k = 0; k < K_STEPS; k += 2) {
        u32 B[4];  // of eight keys: step k, step k + 1; of the next eight keys likewise
        if (k + 1 < K_STEPS) {
          ldmatrix_x4(B, unit_address(group, lane_address(lane / 16 * 8 + lane % 8, lane / 8 % 2), k));
        } else {
          u32 half[2];
          ldmatrix_x2(half, unit_address(group, lane_address(lane % 16, 0), k));
          B[0] = half[0];
          B[2] = half[1];
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          if (k + part < K_STEPS) {
            u32 Q_step[M_TILES][1][4];
            if constexpr (!Q_IN_REGISTERS) load_q(Q_step, k + part, Q_lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const u32 bytes = B[half * 2 + part];
              const u32 b0 = cvt_f16x2_e4m3x2(u16(bytes)), b1 = cvt_f16x2_e4m3x2(u16(bytes >> 16));
#pragma unroll
              for (int i = 0; i < M_TILES; ++i) {
                const u32(&A)[4] = Q_IN_REGISTERS ? Q[i][k + part] : Q_step[i][0];
                mma_m16n8k16_f16(S[i][n + half], A, b0, b1);
              }
            }
          }
        }
      }
    }
  }

  // O += P V for 16 keys. Of 16 columns the even ones are tile n, the odd ones tile n + 1 of O.
  DEVICE void accumulate_e4m3(const u32 (&P)[M_TILES][4], u32 V_smem, int lane) {
#pragma unroll
    for (int n = 0; n < O_TILES; n += 4) {
      u32 B[4];  // of 16 columns: keys 0-7, keys 8-15; of the next 16 columns likewise
      if (n + 2 < O_TILES) {
        ldmatrix_x4_trans(B, unit_address(V_smem, lane_address(lane % 16, lane / 16), n / 2));
      } else {
        u32 half[2];
        ldmatrix_x2_trans(half, unit_address(V_smem, lane_address(lane % 16, 0), n / 2));
        B[0] = half[0];
        B[1] = half[1];
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (n + 2 * part < O_TILES) {
          // Bytes of a register: two columns of one key, the same two of the next.
          const u32 lo = byte_permute(B[2 * part], 0, 0x3120), hi = byte_permute(B[2 * part + 1], 0, 0x3120);
          const u32 even0 = cvt_f16x2_e4m3x2(u16(lo)), even1 = cvt_f16x2_e4m3x2(u16(hi));
          const u32 odd0 = cvt_f16x2_e4m3x2(u16(lo >> 16)), odd1 = cvt_f16x2_e4m3x2(u16(hi >> 16));
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
            mma_m16n8k16_f16(O[i][n + 2 * part], P[i], even0, even1);
            mma_m16n8k16_f16(O[i][n + 2 * part + 1], P[i], odd0, odd1);
          }
        }
      }
    }
  }
};
