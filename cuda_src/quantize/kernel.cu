// Quantisation to e4m3 for forward/fa3_fp8 and fa2_fp8: x = scale * e4m3, where no magnitude of e4m3 exceeds 448.
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Rotation: Shah et al. 2024, FlashAttention-3, section 3.3
// ("incoherent processing"). Mean keys: Zhang et al. 2024, SageAttention, section 4.2.
//
//   quantize_sums    SMOOTH: for each block of tokens, the sum of its rows
//   quantize_mean    SMOOTH: the mean row of each head of each sequence
//   quantize         scale = (largest magnitude among the rows that share the scale) / 448; then rows / scale in e4m3.
//                    SMOOTH: rows minus the mean row. ROTATE: rows are rotated. TRANSPOSE: written as V^T (shared/value_tile.cuh)
//
// cufa/run/cpu/quantize.py has the same arithmetic in the same order, so both give the same bits. Exceptions: mean rows, whose
// float64 sums have another order; subnormal float32 and bfloat16, which are read as 0 here.
//
// Thread block b of `quantize` publishes the largest magnitude of token block b, then casts token block b - p.lead. By then
// most maxima that share its scale are published, and its rows are read from the L2 cache. A thread block waits for maxima of
// thread blocks of smaller index only, which have started before (primitives/semaphore.cuh).
//
// ROTATE: the scale follows from a bound, sum |x| / sqrt(n) of a row, so that rows are rotated once. The bound is at most sqrt(n)
// times the largest rotated number; e4m3 keeps its relative precision for numbers far below 448. Measurements: NOTES.md.
#include "quantize/config.cuh"
#include "primitives/grid.cuh"
#include "primitives/maximum.cuh"
#include "primitives/semaphore.cuh"
#include "quantize/rows.cuh"

constexpr float LARGEST = 448.0f;
constexpr int ROWS_OF_THREAD = TRANSPOSE ? 4 : 1;  // TRANSPOSE: four keys make a word of V^T
// ROTATE: each number is shuffled once for each doubling of lanes, so few lanes share a row.
using CastRows = ThreadRows<TRANSPOSE ? lanes_of_row(HEAD_DIM) : HEAD_DIM <= 128 ? 4 : 8, ROWS_OF_THREAD>;
constexpr int THREADS = CastRows::THREADS, BLOCKS_PER_SM = 1024 / THREADS;
using Tile = ValueTile<HEAD_DIM, TOKENS / 4, THREADS>;

// The scale of a largest magnitude. NaN and infinity pass through: numbers on a GPU are not checked.
DEVICE float scale_of(float largest) {
  constexpr float smallest = 1.17549435e-38f;
  const float scale = largest / LARGEST;
  return largest == 0.0f ? 1.0f : scale < smallest ? smallest : scale;
}

// ---- Mean rows. Grid: token blocks of all heads

using SumRows = ThreadRows<lanes_of_row(HEAD_DIM), 4>;

KERNEL __launch_bounds__(SumRows::THREADS) quantize_sums(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(sums_start);
  const u32 smem = smem_address(sums_start);  // LANE_GROUPS rows of HEAD_DIM float64 sums
  auto place = [&](int lane_group, int column) { return smem + (lane_group * HEAD_DIM + column) * 8; };
  const SumRows part{p, tokens_of(p, blockIdx.x)};
  SumRows::RawRow raw[4];
  float y[4][COLUMNS];
  part.load_rows(raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack(raw[i][0], y[i]);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const double sum = double(y[0][c]) + y[1][c] + y[2][c] + y[3][c];
    vec2 bits;
    memcpy(&bits, &sum, 8);
    if (part.has_vector(0)) st_shared_vec2(place(part.lane_group, part.column(0) + c), bits);
  }
  block_sync();  // each thread has stored its sums
  for (int column = threadIdx.x; column < HEAD_DIM; column += SumRows::THREADS) {
    double sum = 0;
    for (int lane_group = 0; lane_group < SumRows::LANE_GROUPS; ++lane_group) {
      const vec2 bits = ld_shared_vec2(place(lane_group, column));
      double group_sum;
      memcpy(&group_sum, &bits, 8);
      sum += group_sum;
    }
    st_global(p.sums + i64(blockIdx.x) * HEAD_DIM + column, sum);
  }
}

// Grid: (sequences, heads); a thread for each column.
KERNEL __launch_bounds__(256) quantize_mean(const __grid_constant__ QuantizeParams p) {
  const int sequence = blockIdx.x, column = threadIdx.x;
  if (column >= HEAD_DIM) return;
  int rows = int(p.seqlen);
  i64 first = i64(sequence) * ((rows + VALUE_KEYS - 1) / VALUE_KEYS * BLOCKS_OF_KEYS);
  if (LENGTHS_KIND == PADDED) rows = within(ld_global<i32>(p.lengths + sequence), rows);
  if (LENGTHS_KIND == PACKED) {
    const int begin = within(ld_global<i32>(p.lengths + sequence), rows);
    first = i64(first_packed_block<VALUE_KEYS>(begin, sequence)) * BLOCKS_OF_KEYS;
    rows = max(within(ld_global<i32>(p.lengths + sequence + 1), rows) - begin, 0);
  }
  const double* sums = p.sums + (blockIdx.y * p.blocks + first) * HEAD_DIM + column;
  double sum = 0;
#pragma unroll 16
  for (int block = 0; block < (rows + TOKENS - 1) / TOKENS; ++block) sum += ld_global<double>(sums + i64(block) * HEAD_DIM);
  st_global(p.mean + (i64(sequence) * p.heads + blockIdx.y) * HEAD_DIM + column, rows ? float(sum / rows) : 0.0f);
}

// ---- Scales and e4m3

constexpr int SCALES = SCALE_OF == OF_BLOCK ? 2 : 1;  // scales that the tokens of a thread block may have
constexpr u32 PUBLISHED = 0x80000000;                 // this bit of a word of p.maxima is set: the word is final
constexpr int EXCHANGE_BYTES = SCALES * (THREADS / 32) * 4;
using Maxima = u32[SCALES];

// The first token that has scale i: the thread block's first token, or the begin of the next SCALE_BLOCK tokens.
DEVICE int scale_token(const Tokens& t, int i) { return i == 0 ? t.first : (t.first / SCALE_BLOCK + 1) * SCALE_BLOCK; }
DEVICE bool needs_scale(const Tokens& t, int i) {
  const int token = scale_token(t, i);
  return SCALE_OF == OF_TENSOR || (t.exists(token) && token < t.first + TOKENS);
}
// Index of a token's scale among the SCALES scales.
DEVICE int scale_of_token(const Tokens& t, int token) { return SCALE_OF == OF_BLOCK && token >= scale_token(t, 1) ? 1 : 0; }

// x = maximum over all threads of the block. `smem`: EXCHANGE_BYTES bytes.
DEVICE void largest_of_block(Maxima& x, u32 smem) {
  constexpr int WARPS = THREADS / 32;
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    x[i] = redux_max(x[i]);
    if (threadIdx.x % 32 == 0) st_shared_u32(smem + (i * WARPS + threadIdx.x / 32) * 4, x[i]);
  }
  block_sync();  // each warp has stored its maxima
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
#pragma unroll
    for (int w = 0; w < WARPS; ++w) x[i] = max(x[i], ld_shared_u32(smem + (i * WARPS + w) * 4));
  }
}

// Writes the maxima of this block of tokens to p.maxima.
DEVICE void publish_maxima(const CastRows& part, const CastRows::RawRow (&raw)[ROWS_OF_THREAD], u32 smem) {
  const Tokens& t = part.t;
  Maxima top = {};
#pragma unroll
  for (int r = 0; r < ROWS_OF_THREAD; ++r) {
    const u32 found = part.largest(raw[r]), largest = t.exists(part.token(r)) ? found : 0;
    const int scale = scale_of_token(t, part.token(r));
#pragma unroll
    for (int i = 0; i < SCALES; ++i) top[i] = max(top[i], i == scale ? largest : 0);
  }
  largest_of_block(top, smem);
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    if (threadIdx.x == 0) red_max_u32(part.p.maxima + t.index(part.p) * SCALES + i, top[i] | PUBLISHED);
  }
}

// top = for each scale, the maximum over all token blocks that share it. Waits until these are published.
DEVICE void await_maxima(const QuantizeParams& p, const Tokens& t, Maxima& top, u32 smem) {
  const i64 first_of_sequence = t.index(p) - t.first / TOKENS;
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    top[i] = 0;
    if (!needs_scale(t, i)) continue;
    const int block = scale_token(t, i) / SCALE_BLOCK;  // index of the SCALE_BLOCK tokens; for OF_BLOCK only
    i64 first = first_of_sequence, end = first + (t.rows + TOKENS - 1) / TOKENS;
    if constexpr (SCALE_OF == OF_TENSOR) {
      first = 0;
      end = p.blocks * p.heads;
    } else if constexpr (SCALE_OF == OF_BLOCK) {
      end = min(end, first + ((block + 1) * SCALE_BLOCK + TOKENS - 1) / TOKENS);
      first += block * SCALE_BLOCK / TOKENS;
    }
    for (i64 n = first + threadIdx.x; n < end; n += THREADS) {
      // Token block n may begin before this scale's first token: then its second maximum belongs to this scale.
      const int second = SCALE_OF == OF_BLOCK && int(n - first_of_sequence) * TOKENS < block * SCALE_BLOCK ? 1 : 0;
      u32 word = 0;
      while (!(word & PUBLISHED)) word = ld_acquire_gpu(p.maxima + n * SCALES + second);
      top[i] = max(top[i], word & ~PUBLISHED);
    }
  }
  largest_of_block(top, smem);
}

// Writes x / scale in e4m3. `scales`: one for each row of the thread.
DEVICE void cast(const CastRows& part, const CastRows::RawRow (&raw)[ROWS_OF_THREAD],
                 const float (&scales)[ROWS_OF_THREAD], u32 smem) {
  constexpr int ROWS = ROWS_OF_THREAD, VECTORS = CastRows::VECTORS;
  const QuantizeParams& p = part.p;
  const Tokens& t = part.t;
  CastRows::Row y[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    part.widen(raw[i], y[i]);
    if constexpr (ROTATE) part.rotate(y[i]);
    const float inverse = t.exists(part.token(i)) ? 1.0f / scales[i] : 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) y[i][v][c] *= ROTATE ? CastRows::INVERSE_ROOT * inverse : inverse;
    }
  }
  char* out = p.out + t.batch * p.out_batch + t.head * p.out_head;
  if constexpr (TRANSPOSE) {
    const Tile tile{smem};
    u32 keys[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      keys[c] = cvt_e4m3x2(y[0][0][c], y[1][0][c]) | cvt_e4m3x2(y[2][0][c], y[3][0][c]) << 16;
    }
    if (part.has_vector(0)) tile.write(part.column(0), part.lane_group, keys);
    block_sync();  // the tile is complete
    // The grid may have more blocks than V^T has positions.
    if (LENGTHS_KIND == PACKED && t.block / BLOCKS_OF_KEYS >= p.seqlen / VALUE_KEYS + p.sequences) return;
    tile.store(out + (LENGTHS_KIND == PACKED ? i64(t.block) * TOKENS : t.first), p.out_row);
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      char* row = out + (t.begin + part.token(i)) * p.out_row;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const float(&c)[COLUMNS] = y[i][v];
        vec2 e4m3{cvt_e4m3x2(c[0], c[1]) | cvt_e4m3x2(c[2], c[3]) << 16, cvt_e4m3x2(c[4], c[5]) | cvt_e4m3x2(c[6], c[7]) << 16};
        if (!t.exists(part.token(i))) e4m3 = {};  // y * 0 may be -0
        if (part.has_vector(v) && part.token(i) < t.stored) st_global(row + part.column(v), e4m3);
      }
    }
  }
}

// Grid: token blocks of all heads, plus p.lead.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM) quantize(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(start);
  const u32 smem = smem_address(start), exchange = smem + (TRANSPOSE ? Tile::BYTES : 0);
  const u32 blocks = u32(p.blocks * p.heads), lead = u32(p.lead);
  const bool publishes = SCALE_OF != OF_TOKEN && blockIdx.x < blocks, casts = blockIdx.x >= lead;
  const CastRows ahead{p, tokens_of(p, publishes ? blockIdx.x : 0)}, part{p, tokens_of(p, casts ? blockIdx.x - lead : 0)};
  CastRows::RawRow raw_ahead[ROWS_OF_THREAD], raw[ROWS_OF_THREAD];
  if (publishes) ahead.load_rows(raw_ahead);
  if (casts) part.load_rows(raw);
  if (publishes) publish_maxima(ahead, raw_ahead, exchange);
  if (!casts) return;
  const Tokens& t = part.t;
  float scales[ROWS_OF_THREAD];
  if constexpr (SCALE_OF == OF_TOKEN) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; ++i) {
      scales[i] = scale_of(u32_as_float(part.largest_of_row(part.largest(raw[i]))));
      if (part.lane == 0 && part.token(i) < t.stored) st_global(p.scale + scale_index(p, t, part.token(i)), scales[i]);
    }
  } else {
    Maxima top;
    await_maxima(p, t, top, exchange + EXCHANGE_BYTES);
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
      const int token = scale_token(t, i);
      bool own = SCALE_OF == OF_BLOCK ? token % SCALE_BLOCK == 0 : token == 0;
      if (SCALE_OF == OF_TENSOR) own = t.index(p) == 0;
      if (threadIdx.x == 0 && needs_scale(t, i) && own) {
        st_global(p.scale + scale_index(p, t, token), scale_of(u32_as_float(top[i])));
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; ++i) scales[i] = scale_of(u32_as_float(top[scale_of_token(t, part.token(i)) % SCALES]));
  }
  cast(part, raw, scales, smem);
}
