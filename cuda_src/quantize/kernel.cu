// Quantisation to e4m3: x = scale * e4m3 with the largest magnitude at 448 or below, for forward/fa3_fp8.
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Rotation: Shah et al. 2024, FlashAttention-3, section 3.3
// ("incoherent processing"). Mean keys: Zhang et al. 2024, SageAttention, section 4.2.
//
//   quantize_sums    SMOOTH: sums of rows of each block
//   quantize_mean    SMOOTH: the mean row of each head
//   quantize         scale = largest / 448 of what shares a scale, of smoothed rows; then rows / scale in e4m3, rotated, or with
//                    TRANSPOSE as columns in the order of shared/value_tile.cuh
//
// cufa/run/cpu/quantize.py has the same arithmetic in the same order: scales and numbers agree bit by bit, except for means,
// whose float64 sums are added in another order. Subnormal float32 and bfloat16 are read as 0.
//
// Thread block b finds the maxima of block b of x and casts block b - p.lead, whose scale is then known: rows are read from
// memory once, and for the cast from the L2 cache. It waits for maxima of thread blocks of smaller index only, which have
// started before (primitives/semaphore.cuh).
//
// ROTATE: the largest magnitude is a bound, sum |x| / sqrt(n) of a row, so that rows are rotated once. It is at most sqrt(n)
// times the largest rotated number. e4m3 is as precise for numbers far below 448. Measurements: NOTES.md.
#include "quantize/config.cuh"
#include "primitives/grid.cuh"
#include "primitives/maximum.cuh"
#include "primitives/semaphore.cuh"
#include "quantize/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK, OF_TOKEN };
constexpr int TOKENS = 64, COLUMNS = 8;  // of a thread block; of a vector
constexpr int BLOCKS_OF_KEYS = VALUE_KEYS / TOKENS;
constexpr float LARGEST = 448.0f;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: rows are whole vectors, of at most one warp");
static_assert(SCALE_BLOCK >= TOKENS, "SCALE_BLOCK: a thread block has tokens of at most two blocks");

// ---- Tokens of a block

struct Tokens {
  u32 block;            // of its head
  int head, sequence, first;  // the block's first token, counted in its sequence
  int rows, stored;     // of the sequence: tokens; tokens and padding
  i64 batch, begin;     // where the sequence begins in x

  DEVICE bool exists(int token) const { return token < rows; }
  DEVICE i64 number(const QuantizeParams& p) const { return i64(head) * p.blocks + block; }
};

// Blocks are numbered head by head. Sequences begin with whole VALUE_KEYS, as V^T has positions for so many keys at a time.
DEVICE Tokens tokens_of(const QuantizeParams& p, u32 number) {
  const int seqlen = int(p.seqlen), sequences = int(p.sequences), head = int(number / u32(p.blocks));
  const u32 block = number % u32(p.blocks);
  if constexpr (LENGTHS_KIND == PACKED) {
    const PackedBlock at = packed_block<VALUE_KEYS>(p.lengths, sequences, seqlen, block / BLOCKS_OF_KEYS);
    const bool behind = at.sequence == sequences;  // the rest of the array
    const int begin = within(ld_global<i32>(p.lengths + at.sequence), seqlen);
    const int end = behind ? seqlen : within(ld_global<i32>(p.lengths + at.sequence + 1), seqlen);
    const int stored = max(end - begin, 0);
    return {block,  head, at.sequence, at.block * VALUE_KEYS + int(block % BLOCKS_OF_KEYS) * TOKENS, behind ? 0 : stored,
            stored, 0,    begin};
  }
  const int blocks = (seqlen + VALUE_KEYS - 1) / VALUE_KEYS * BLOCKS_OF_KEYS, sequence = int(block) / blocks;
  const int rows = LENGTHS_KIND == PADDED ? within(ld_global<i32>(p.lengths + sequence), seqlen) : seqlen;
  return {block, head, sequence, int(block) % blocks * TOKENS, rows, seqlen, sequence, 0};
}

DEVICE i64 scale_index(const QuantizeParams& p, const Tokens& t, int token) {
  const i64 of_head = i64(t.sequence) * p.heads + t.head;
  if constexpr (SCALE_OF == OF_TENSOR) return 0;
  if constexpr (SCALE_OF == OF_HEAD) return of_head;
  if constexpr (SCALE_OF == OF_TOKEN) return (LENGTHS_KIND == PACKED ? t.head : of_head) * p.seqlen + t.begin + token;
  if constexpr (LENGTHS_KIND == PACKED) {
    const i64 blocks = p.seqlen / SCALE_BLOCK + p.sequences;
    return t.head * blocks + first_packed_block<SCALE_BLOCK>(int(t.begin), t.sequence) + token / SCALE_BLOCK;
  }
  return of_head * ((p.seqlen + SCALE_BLOCK - 1) / SCALE_BLOCK) + token / SCALE_BLOCK;
}

// ---- Vectors of a row

struct Raw {
  vec4 bits[ELEMENT_BYTES / 2];
};

// Zeros if there is no vector.
DEVICE Raw load(const char* vector, bool exists) {
  Raw raw{};
  if (!exists) return raw;
  if constexpr (ALIGNMENT == 16) {
#pragma unroll
    for (int i = 0; i < ELEMENT_BYTES / 2; ++i) raw.bits[i] = ld_global<vec4>(vector + 16 * i);
  } else {
    u32 words[2 * ELEMENT_BYTES];
#pragma unroll
    for (int i = 0; i < 2 * ELEMENT_BYTES; ++i) {
      const char* at = vector + 4 * i;
      words[i] = ELEMENT_BYTES == 4 ? ld_global<u32>(at) : ld_global<u16>(at) | ld_global<u16>(at + 2) << 16;
    }
    memcpy(&raw, words, sizeof(raw));
  }
  return raw;
}

DEVICE void unpack(const Raw& raw, float (&y)[COLUMNS]) {
  u32 words[2 * ELEMENT_BYTES];
  memcpy(words, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    y[i] = ELEMENT_BYTES == 4 ? u32_as_float(words[i]) : SixteenBit<BFLOAT16>::widen(u16(words[i / 2] >> i % 2 * 16));
  }
}

// The part of a thread in a block of tokens: ROWS rows, of which LANES threads share each, and of a row VECTORS vectors.
template <int LANES, int ROWS>
struct Part {
  static constexpr int GROUPS = TOKENS / ROWS, THREADS = LANES * GROUPS;
  static constexpr int VECTORS = (HEAD_DIM + COLUMNS * LANES - 1) / (COLUMNS * LANES);
  static constexpr int N = HEAD_DIM & -HEAD_DIM;  // columns that are rotated together: the largest power of two that divides
  static constexpr int LANES_TOGETHER = N / COLUMNS < LANES ? N / COLUMNS : LANES, TOGETHER = N / (COLUMNS * LANES);
  static constexpr float ROOT_2 = 0.70710678118654752f;
  static constexpr float ROOT = N == 16 ? 0.25f : N == 32 ? ROOT_2 / 4 : N == 64 ? 0.125f : N == 128 ? ROOT_2 / 8 : 0.0625f;
  using Row = float[VECTORS][COLUMNS];
  using RawRow = Raw[VECTORS];

  const QuantizeParams& p;
  const Tokens t;
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;

  DEVICE int column(int vector) const { return (vector * LANES + lane) * COLUMNS; }
  DEVICE bool there(int vector) const { return column(vector) < HEAD_DIM; }
  // TRANSPOSE: the tokens of a word.
  DEVICE int token(int i) const {
    return t.first + (TRANSPOSE ? first_key_of_word(group) + key_of_word(i) : group + i * GROUPS);
  }

  DEVICE void load_rows(RawRow (&raw)[ROWS]) const {
    const char* x = p.x + t.batch * p.x_batch + t.head * p.x_head;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const char* row = x + (t.begin + token(i)) * p.x_row;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) raw[i][v] = load(row + column(v) * ELEMENT_BYTES, there(v) && t.exists(token(i)));
    }
  }

  // Float32, smoothed.
  DEVICE void widen(const RawRow& raw, Row& y) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack(raw[v], y[v]);
      if (!SMOOTH || !there(v) || t.sequence >= p.sequences) continue;
      const float* mean = p.mean + (i64(t.sequence) * p.heads + t.head) * HEAD_DIM + column(v);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) y[v][i] -= ld_global<float>(mean + i);
    }
  }

  // Bits of the largest magnitude of this thread's columns; ROTATE: of the bound, the same for LANES_TOGETHER lanes.
  DEVICE u32 largest(const RawRow& raw) const {
    Row y;
    widen(raw, y);
    u32 found = 0;
    if constexpr (ROTATE) {
      float sums[VECTORS];
      row_sums(y, sums);
#pragma unroll
      for (int v = 0; v < VECTORS; v += TOGETHER > 0 ? TOGETHER : 1) found = max(found, float_as_u32(sums[v] * ROOT));
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) found = max(found, float_as_u32(y[v][i]) & 0x7fffffff);
      }
    }
    return found;
  }
  // sums[v] = sum |y| over the N columns that begin with those of vector v, where v is a multiple of TOGETHER.
  DEVICE void row_sums(const Row& y, float (&sums)[VECTORS]) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float a[COLUMNS];
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) a[i] = fabsf(y[v][i]);
      sums[v] = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
#pragma unroll
      for (int distance = 1; distance < LANES_TOGETHER; distance *= 2) sums[v] += shfl_xor(sums[v], distance);
    }
#pragma unroll
    for (int distance = 1; distance < TOGETHER; distance *= 2) {
#pragma unroll
      for (int v = 0; v + distance < VECTORS; v += 2 * distance) sums[v] += sums[v + distance];
    }
  }
  // The largest of all lanes of a row.
  DEVICE u32 largest_of_row(u32 x) const {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) x = max(x, shfl_xor(x, distance));
    return x;
  }

  // y diag(signs) H for each N columns: a butterfly for each bit of the column.
  DEVICE void rotate(Row& y) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int vector = v * LANES + lane;
      const u32 signs = there(v) ? u32(p.signs[vector / 8] >> vector % 8 * 8) << 24 : 0;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) y[v][i] = u32_as_float(float_as_u32(y[v][i]) ^ (signs << i & 0x80000000));
#pragma unroll
      for (int distance = 1; distance < COLUMNS; distance *= 2) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          if (!(i & distance)) butterfly(y[v][i], y[v][i + distance]);
        }
      }
#pragma unroll
      for (int distance = 1; distance < LANES_TOGETHER; distance *= 2) {
        const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) y[v][i] = fmaf(sign, y[v][i], shfl_xor(y[v][i], distance));
      }
    }
#pragma unroll
    for (int distance = 1; distance < TOGETHER; distance *= 2) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          if (!(v & distance)) butterfly(y[v][i], y[v + distance][i]);
        }
      }
    }
  }
  static DEVICE void butterfly(float& low, float& high) {
    const float sum = low + high;
    high = low - high;
    low = sum;
  }
};
constexpr int ROWS_OF_THREAD = TRANSPOSE ? 4 : 1;
// TRANSPOSE: one vector of each of four rows, which make a word. Else few lanes a row, with many columns each: a rotation needs
// a shuffle for each number and each doubling of lanes.
using ThreadPart = Part<TRANSPOSE ? lanes_of_row(HEAD_DIM) : HEAD_DIM <= 128 ? 4 : 8, ROWS_OF_THREAD>;
constexpr int THREADS = ThreadPart::THREADS, BLOCKS_PER_SM = 1024 / THREADS;
using Tile = ValueTile<HEAD_DIM, TOKENS / 4, THREADS>;

// NaN and infinity remain: the host does not see them.
DEVICE float scale_of(float largest) {
  constexpr float smallest = 1.17549435e-38f;
  const float scale = largest / LARGEST;
  return largest == 0.0f ? 1.0f : scale < smallest ? smallest : scale;
}

// ---- Means. Grid: blocks of all heads

using SumPart = Part<lanes_of_row(HEAD_DIM), 4>;

KERNEL __launch_bounds__(SumPart::THREADS) quantize_sums(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(sums_start);
  const u32 smem = smem_address(sums_start);  // GROUPS rows of HEAD_DIM sums
  auto place = [&](int group, int column) { return smem + (group * HEAD_DIM + column) * 8; };
  const SumPart part{p, tokens_of(p, blockIdx.x)};
  SumPart::RawRow raw[4];
  float y[4][COLUMNS];
  part.load_rows(raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack(raw[i][0], y[i]);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const double sum = double(y[0][c]) + y[1][c] + y[2][c] + y[3][c];
    vec2 bits;
    memcpy(&bits, &sum, 8);
    if (part.there(0)) st_shared_vec2(place(part.group, part.column(0) + c), bits);
  }
  block_sync();  // each thread has stored its sums
  for (int column = threadIdx.x; column < HEAD_DIM; column += SumPart::THREADS) {
    double sum = 0;
    for (int group = 0; group < SumPart::GROUPS; ++group) {
      const vec2 bits = ld_shared_vec2(place(group, column));
      double of_group;
      memcpy(&of_group, &bits, 8);
      sum += of_group;
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

constexpr int SCALES = SCALE_OF == OF_BLOCK ? 2 : 1;  // that a thread block may need
constexpr u32 FOUND = 0x80000000;                     // of a word of p.maxima: it is the block's maximum
constexpr int EXCHANGE_BYTES = SCALES * (THREADS / 32) * 4;
using Maxima = u32[SCALES];

// The first token of the block, and the first of the next block of SCALE_BLOCK tokens.
DEVICE int scale_token(const Tokens& t, int i) { return i == 0 ? t.first : (t.first / SCALE_BLOCK + 1) * SCALE_BLOCK; }
DEVICE bool needs_scale(const Tokens& t, int i) {
  const int token = scale_token(t, i);
  return SCALE_OF == OF_TENSOR || (t.exists(token) && token < t.first + TOKENS);
}
// Which of the scales a token has.
DEVICE int scale_of_token(const Tokens& t, int token) { return SCALE_OF == OF_BLOCK && token >= scale_token(t, 1) ? 1 : 0; }

// x becomes the largest of all threads. `smem`: EXCHANGE_BYTES.
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

// The maxima of a block to p.maxima.
DEVICE void publish_maxima(const ThreadPart& part, const ThreadPart::RawRow (&raw)[ROWS_OF_THREAD], u32 smem) {
  const Tokens& t = part.t;
  Maxima top = {};
#pragma unroll
  for (int r = 0; r < ROWS_OF_THREAD; ++r) {
    const u32 found = part.largest(raw[r]), largest = t.exists(part.token(r)) ? found : 0;
    const int whose = scale_of_token(t, part.token(r));
#pragma unroll
    for (int i = 0; i < SCALES; ++i) top[i] = max(top[i], i == whose ? largest : 0);
  }
  largest_of_block(top, smem);
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    if (threadIdx.x == 0) red_max_u32(part.p.maxima + t.number(part.p) * SCALES + i, top[i] | FOUND);
  }
}

// The largest magnitudes of all blocks that share a scale with this one. Waits until they are published.
DEVICE void await_maxima(const QuantizeParams& p, const Tokens& t, Maxima& top, u32 smem) {
  const i64 first_of_sequence = t.number(p) - t.first / TOKENS;
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    top[i] = 0;
    if (!needs_scale(t, i)) continue;
    const int block = scale_token(t, i) / SCALE_BLOCK;  // OF_BLOCK
    i64 first = first_of_sequence, end = first + (t.rows + TOKENS - 1) / TOKENS;
    if constexpr (SCALE_OF == OF_TENSOR) {
      first = 0;
      end = p.blocks * p.heads;
    } else if constexpr (SCALE_OF == OF_BLOCK) {
      end = min(end, first + ((block + 1) * SCALE_BLOCK + TOKENS - 1) / TOKENS);
      first += block * SCALE_BLOCK / TOKENS;
    }
    for (i64 n = first + threadIdx.x; n < end; n += THREADS) {
      // A thread block that begins before this block of SCALE_BLOCK tokens has the maximum as its second.
      const int second = SCALE_OF == OF_BLOCK && int(n - first_of_sequence) * TOKENS < block * SCALE_BLOCK ? 1 : 0;
      u32 word = 0;
      while (!(word & FOUND)) word = ld_acquire_gpu(p.maxima + n * SCALES + second);
      top[i] = max(top[i], word & ~FOUND);
    }
  }
  largest_of_block(top, smem);
}

// x / scale in e4m3; `scales` of each row.
DEVICE void cast(const ThreadPart& part, const ThreadPart::RawRow (&raw)[ROWS_OF_THREAD],
                 const float (&scales)[ROWS_OF_THREAD], u32 smem) {
  constexpr int ROWS = ROWS_OF_THREAD, VECTORS = ThreadPart::VECTORS;
  const QuantizeParams& p = part.p;
  const Tokens& t = part.t;
  ThreadPart::Row y[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    part.widen(raw[i], y[i]);
    if constexpr (ROTATE) part.rotate(y[i]);
    const float inverse = t.exists(part.token(i)) ? 1.0f / scales[i] : 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) y[i][v][c] *= ROTATE ? ThreadPart::ROOT * inverse : inverse;
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
    if (part.there(0)) tile.write(part.column(0), part.group, keys);
    block_sync();  // the tile is complete
    // V^T has no positions for the last blocks.
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
        if (!t.exists(part.token(i))) e4m3 = {};  // not -0
        if (part.there(v) && part.token(i) < t.stored) st_global(row + part.column(v), e4m3);
      }
    }
  }
}

// Grid: blocks of all heads, and p.lead.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM) quantize(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(start);
  const u32 smem = smem_address(start), exchange = smem + (TRANSPOSE ? Tile::BYTES : 0);
  const u32 blocks = u32(p.blocks * p.heads), lead = u32(p.lead);
  const bool finds = SCALE_OF != OF_TOKEN && blockIdx.x < blocks, casts = blockIdx.x >= lead;
  const ThreadPart ahead{p, tokens_of(p, finds ? blockIdx.x : 0)}, part{p, tokens_of(p, casts ? blockIdx.x - lead : 0)};
  ThreadPart::RawRow raw_ahead[ROWS_OF_THREAD], raw[ROWS_OF_THREAD];
  if (finds) ahead.load_rows(raw_ahead);
  if (casts) part.load_rows(raw);
  if (finds) publish_maxima(ahead, raw_ahead, exchange);
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
      if (SCALE_OF == OF_TENSOR) own = t.number(p) == 0;
      if (threadIdx.x == 0 && needs_scale(t, i) && own) {
        st_global(p.scale + scale_index(p, t, token), scale_of(u32_as_float(top[i])));
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; ++i) scales[i] = scale_of(u32_as_float(top[scale_of_token(t, part.token(i)) % SCALES]));
  }
  cast(part, raw, scales, smem);
}
