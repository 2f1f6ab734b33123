// Quantisation to e4m3: x = scale * e4m3 with the largest magnitude at 448, for forward/fa3_fp8.
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Rotation: Shah et al. 2024, FlashAttention-3, section 3.3
// ("incoherent processing"). Mean keys: Zhang et al. 2024, SageAttention, section 4.2.
//
//   quantize_sums    SMOOTH: sums of rows of each chunk
//   quantize_mean    SMOOTH: the mean row of each head
//   quantize         the largest magnitude of what shares a scale, of smoothed and rotated rows; then rows / scale in e4m3, with
//                    TRANSPOSE as columns in the order of shared/value_tile.cuh
//   quantize_scales  scale = largest / 448, in place
//
// cufa/run/cpu/quantize.py has the same arithmetic in the same order: scales and numbers agree bit by bit, except for means,
// whose float64 sums are added in another order. Subnormal float32 and bfloat16 are read as 0.
//
// A thread block of quantize has TOKENS tokens of a head, a thread eight columns of a row: loads of 16 bytes, stores of 8.
// The blocks of a few heads find maxima, then those of the next heads, then the blocks that cast the first heads, and so on:
// rows are read from memory once, and for the cast from the L2 cache. A block that casts waits for blocks of smaller index
// only. GPUs start blocks in the order of their index, as CUB's decoupled look-back relies on. Measurements: NOTES.md.
#include "quantize/config.cuh"
#include "primitives/maximum.cuh"
#include "primitives/semaphore.cuh"
#include "quantize/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK, OF_TOKEN };
constexpr int TOKENS = VALUE_KEYS, WARPS = 8, COLUMNS = 8;  // COLUMNS: of a thread
constexpr int LANES = lanes_of_row(HEAD_DIM), WARP_ROWS = 32 / LANES;
constexpr int STEPS = TOKENS / (WARPS * WARP_ROWS), IN_FLIGHT = STEPS < 4 ? STEPS : 4;
constexpr int NO_MEAN = -1;  // of a sequence
constexpr float LARGEST = 448.0f;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: rows are whole vectors, of at most one warp");
static_assert(STEPS * WARPS * WARP_ROWS == TOKENS && STEPS % IN_FLIGHT == 0, "TOKENS: whole steps of a thread block");

// ---- Tokens of a block

struct Tokens {
  int sequence, first;  // the block's first token, counted in its sequence
  int rows, stored;     // of the sequence: tokens; tokens and padding
  i64 batch, begin;     // where the sequence begins in x

  DEVICE bool exists(int token) const { return token < rows; }
};

DEVICE Tokens tokens_of(const QuantizeParams& p, u32 block) {
  const int seqlen = int(p.seqlen), sequences = int(p.sequences);
  if constexpr (LENGTHS_KIND == PACKED) {
    const PackedBlock at = packed_block<TOKENS>(p.lengths, sequences, seqlen, block);
    const bool behind = at.sequence == sequences;  // the rest of the array
    const int begin = within(ld_global<i32>(p.lengths + at.sequence), seqlen);
    const int end = behind ? seqlen : within(ld_global<i32>(p.lengths + at.sequence + 1), seqlen);
    const int stored = max(end - begin, 0);
    return {at.sequence, at.block * TOKENS, behind ? 0 : stored, stored, 0, begin};
  }
  const int blocks = (seqlen + TOKENS - 1) / TOKENS, sequence = int(block) / blocks;
  const int rows = LENGTHS_KIND == PADDED ? within(ld_global<i32>(p.lengths + sequence), seqlen) : seqlen;
  return {sequence, int(block) % blocks * TOKENS, rows, seqlen, sequence, 0};
}

DEVICE i64 scale_index(const QuantizeParams& p, const Tokens& t, int head, int token) {
  const i64 of_head = i64(t.sequence) * p.heads + head;
  if constexpr (SCALE_OF == OF_TENSOR) return 0;
  if constexpr (SCALE_OF == OF_HEAD) return of_head;
  if constexpr (SCALE_OF == OF_TOKEN) return (LENGTHS_KIND == PACKED ? head : of_head) * p.seqlen + t.begin + token;
  if constexpr (LENGTHS_KIND == PACKED) {
    const i64 blocks = p.seqlen / SCALE_BLOCK + p.sequences;
    return head * blocks + first_packed_block<SCALE_BLOCK>(int(t.begin), t.sequence) + token / SCALE_BLOCK;
  }
  return of_head * ((p.seqlen + SCALE_BLOCK - 1) / SCALE_BLOCK) + token / SCALE_BLOCK;
}

// ---- Eight columns of a row

struct Raw {
  vec4 bits[ELEMENT_BYTES / 2];
};

// Zeros if the thread has no columns or the token does not exist.
DEVICE Raw load(const char* row, bool exists) {
  Raw raw{};
  if (!exists) return raw;
  if constexpr (ALIGNMENT == 16) {
#pragma unroll
    for (int i = 0; i < ELEMENT_BYTES / 2; ++i) raw.bits[i] = ld_global<vec4>(row + 16 * i);
  } else {
    u32 words[2 * ELEMENT_BYTES];
#pragma unroll
    for (int i = 0; i < 2 * ELEMENT_BYTES; ++i) {
      const char* at = row + 4 * i;
      words[i] = ELEMENT_BYTES == 4 ? ld_global<u32>(at) : ld_global<u16>(at) | ld_global<u16>(at + 2) << 16;
    }
    memcpy(&raw, words, sizeof(raw));
  }
  return raw;
}

// Of one thread: what it does to its columns of any row.
struct Columns {
  static constexpr int N = HEAD_DIM & -HEAD_DIM;  // columns that are rotated together: the largest power of two that divides
  static constexpr float ROOT_2 = 0.70710678118654752f;
  static constexpr float ROOT = N == 16 ? 0.25f : N == 32 ? ROOT_2 / 4 : N == 64 ? 0.125f : N == 128 ? ROOT_2 / 8 : 0.0625f;
  int lane, first;  // its place among the lanes of a row, its first column
  u32 signs[COLUMNS] = {};
  float mean[COLUMNS] = {};

  DEVICE Columns(const QuantizeParams& p, int sequence, int head) : lane(threadIdx.x % LANES), first(lane * COLUMNS) {
    if (!there()) return;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      if (ROTATE) signs[i] = u32(p.signs[lane / 8] >> (lane % 8 * 8 + COLUMNS - 1 - i)) << 31;
      if (SMOOTH && sequence != NO_MEAN && sequence < p.sequences) {
        mean[i] = ld_global<float>(p.mean + (i64(sequence) * p.heads + head) * HEAD_DIM + first + i);
      }
    }
  }
  DEVICE bool there() const { return first < HEAD_DIM; }

  DEVICE void unpack(const Raw& raw, float (&y)[COLUMNS]) const {
    u32 words[2 * ELEMENT_BYTES];
    memcpy(words, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      y[i] = ELEMENT_BYTES == 4 ? u32_as_float(words[i]) : SixteenBit<BFLOAT16>::widen(u16(words[i / 2] >> i % 2 * 16));
    }
  }

  // Float32, smoothed and rotated, but for the factor ROOT.
  DEVICE void prepare(const Raw& raw, float (&y)[COLUMNS]) const {
    unpack(raw, y);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      if (SMOOTH) y[i] -= mean[i];
      if (ROTATE) y[i] = u32_as_float(float_as_u32(y[i]) ^ signs[i]);
    }
    if constexpr (ROTATE) rotate(y);
  }

  // y H for each N columns: a butterfly for each bit of the column.
  DEVICE void rotate(float (&y)[COLUMNS]) const {
#pragma unroll
    for (int distance = 1; distance < COLUMNS; distance *= 2) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        if (i & distance) continue;
        const float low = y[i], high = y[i + distance];
        y[i] = low + high;
        y[i + distance] = low - high;
      }
    }
#pragma unroll
    for (int distance = 1; distance < N / COLUMNS; distance *= 2) {
      const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) y[i] = fmaf(sign, y[i], shfl_xor(y[i], distance));
    }
  }

  // Bits of the largest magnitude of a prepared row's columns.
  DEVICE u32 largest(const float (&y)[COLUMNS]) const {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) found = max(found, float_as_u32(y[i]) & 0x7fffffff);
    return ROTATE ? float_as_u32(u32_as_float(found) * ROOT) : found;
  }
};

// The largest of all lanes of a row.
DEVICE u32 largest_of_row(u32 x) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x = max(x, shfl_xor(x, distance));
  return x;
}

// NaN and infinity remain: the host does not see them.
DEVICE float scale_of(float largest) {
  constexpr float smallest = 1.17549435e-38f;
  const float scale = largest / LARGEST;
  return largest == 0.0f ? 1.0f : scale < smallest ? smallest : scale;
}

// f(raw, token) for each of a thread's tokens, whose rows are loaded IN_FLIGHT at a time.
template <typename Function>
DEVICE void each_row(const QuantizeParams& p, const Tokens& t, const Columns& columns, const char* x, Function f) {
  const int row = threadIdx.x / LANES;
  for (int step = 0; step < STEPS; step += IN_FLIGHT) {
    Raw raw[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int token = t.first + row + (step + i) * WARPS * WARP_ROWS;
      raw[i] = load(x + (t.begin + token) * p.x_row, columns.there() && t.exists(token));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) f(raw[i], t.first + row + (step + i) * WARPS * WARP_ROWS);
  }
}

// ---- Means. Grid: (blocks of all sequences, heads)

KERNEL __launch_bounds__(WARPS * 32) quantize_sums(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(sums_start);
  const u32 smem = smem_address(sums_start);  // WARPS rows of HEAD_DIM sums
  const Tokens t = tokens_of(p, blockIdx.x);
  const Columns columns(p, NO_MEAN, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double sums[COLUMNS] = {};
  each_row(p, t, columns, p.x + t.batch * p.x_batch + blockIdx.y * p.x_head + columns.first * ELEMENT_BYTES,
           [&](const Raw& raw, int) {
             float y[COLUMNS];
             columns.unpack(raw, y);
#pragma unroll
             for (int i = 0; i < COLUMNS; ++i) sums[i] += y[i];
           });
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    vec2 bits;
    for (int distance = LANES; distance < 32; distance *= 2) {
      memcpy(&bits, &sums[i], 8);
      bits = {shfl(bits.x, lane ^ distance), shfl(bits.y, lane ^ distance)};
      double other;
      memcpy(&other, &bits, 8);
      sums[i] += other;
    }
    memcpy(&bits, &sums[i], 8);
    if (lane < LANES && columns.there()) st_shared_vec2(smem + (warp * HEAD_DIM + columns.first + i) * 8, bits);
  }
  block_sync();  // each warp has stored its sums
  const int column = threadIdx.x;
  if (column >= HEAD_DIM) return;
  double sum = 0;
  for (int w = 0; w < WARPS; ++w) {
    const vec2 bits = ld_shared_vec2(smem + (w * HEAD_DIM + column) * 8);
    double of_warp;
    memcpy(&of_warp, &bits, 8);
    sum += of_warp;
  }
  st_global(p.sums + (i64(blockIdx.x) * p.heads + blockIdx.y) * HEAD_DIM + column, sum);
}

// Grid: (sequences, heads).
KERNEL __launch_bounds__(WARPS * 32) quantize_mean(const __grid_constant__ QuantizeParams p) {
  const int sequence = blockIdx.x, column = threadIdx.x;
  if (column >= HEAD_DIM) return;
  const int blocks = (int(p.seqlen) + TOKENS - 1) / TOKENS;
  i64 first = i64(sequence) * blocks;
  int rows = int(p.seqlen);
  if (LENGTHS_KIND == PADDED) rows = within(ld_global<i32>(p.lengths + sequence), rows);
  if (LENGTHS_KIND == PACKED) {
    const int begin = within(ld_global<i32>(p.lengths + sequence), rows);
    first = first_packed_block<TOKENS>(begin, sequence);
    rows = max(within(ld_global<i32>(p.lengths + sequence + 1), rows) - begin, 0);
  }
  double sum = 0;
#pragma unroll 8
  for (i64 block = first; block < first + (rows + TOKENS - 1) / TOKENS; ++block) {
    sum += ld_global<double>(p.sums + (block * p.heads + blockIdx.y) * HEAD_DIM + column);
  }
  st_global(p.mean + (i64(sequence) * p.heads + blockIdx.y) * HEAD_DIM + column, rows ? float(sum / rows) : 0.0f);
}

// ---- Maxima and e4m3

// The maxima of a block, whose arrival is counted for its head.
DEVICE void find_maxima(const QuantizeParams& p, const Tokens& t, const Columns& columns, const char* x, int head) {
  u32 top = 0;
  each_row(p, t, columns, x, [&](const Raw& raw, int token) {
    float y[COLUMNS];
    columns.prepare(raw, y);
    u32 largest = t.exists(token) ? columns.largest(y) : 0;
    top = max(top, largest);
    if constexpr (SCALE_OF == OF_BLOCK) {
      largest = largest_of_row(largest);
      if (columns.lane == 0 && largest > 0) red_max_u32(p.scale + scale_index(p, t, head, token), largest);
    }
  });
  if constexpr (SCALE_OF < OF_BLOCK) {
    top = redux_max(top);
    if (threadIdx.x % 32 == 0 && top > 0) red_max_u32(p.scale + scale_index(p, t, head, 0), top);
  }
  block_sync();  // all warps have added their maxima
  if (threadIdx.x == 0) red_release_gpu_add(p.arrived + (SCALE_OF == OF_TENSOR ? 0 : head), 1);
}

// The e4m3 of a block. It waits for the maxima of its head.
DEVICE void cast(const QuantizeParams& p, const Tokens& t, const Columns& columns, const char* x, int head, u32 block) {
  if constexpr (SCALE_OF != OF_TOKEN) {
    const u32 arrivals = u32(p.blocks * (SCALE_OF == OF_TENSOR ? p.heads : 1));
    if (threadIdx.x == 0) {
      while (ld_acquire_gpu(p.arrived + (SCALE_OF == OF_TENSOR ? 0 : head)) != arrivals) {
      }
    }
    block_sync();  // the maxima are complete
  }
  auto inverse_of = [&](int token) {
    return 1.0f / scale_of(ld_global<float>(p.scale + scale_index(p, t, head, token)));
  };
  const float inverse_of_head = SCALE_OF < OF_BLOCK && t.rows > 0 ? inverse_of(0) : 0;
  auto scaled = [&](const Raw& raw, int token, float (&y)[COLUMNS]) {
    columns.prepare(raw, y);
    float inverse = inverse_of_head;
    if constexpr (SCALE_OF == OF_TOKEN) {
      const u32 largest = largest_of_row(t.exists(token) ? columns.largest(y) : 0);
      inverse = 1.0f / scale_of(u32_as_float(largest));
      if (columns.lane == 0 && token < t.stored) st_global(p.scale + scale_index(p, t, head, token), largest);
    }
    if (SCALE_OF == OF_BLOCK && t.exists(token)) inverse = inverse_of(token);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) y[c] = t.exists(token) ? (ROTATE ? y[c] * Columns::ROOT : y[c]) * inverse : 0.0f;
  };
  if constexpr (TRANSPOSE) {
    DYN_SMEM(start);
    const ValueTile<HEAD_DIM, WARPS> tile{smem_address(start)};
    for (int word = threadIdx.x / LANES; word < VALUE_WORDS; word += WARPS * WARP_ROWS) {
      const int first = t.first + first_key_of_word(word);
      Raw raw[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first + key_of_word(i);
        raw[i] = load(x + (t.begin + token) * p.x_row, columns.there() && t.exists(token));
      }
      float y[4][COLUMNS];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled(raw[i], first + key_of_word(i), y[i]);
      u32 keys[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) keys[c] = cvt_e4m3x2(y[0][c], y[1][c]) | cvt_e4m3x2(y[2][c], y[3][c]) << 16;
      if (columns.there()) tile.write(columns.first, word, keys);
    }
    block_sync();  // the tile is complete
    const i64 position = LENGTHS_KIND == PACKED ? i64(block) * TOKENS : t.first;
    tile.store(p.out + t.batch * p.out_batch + head * p.out_head + position, p.out_row);
  } else {
    char* out = p.out + t.batch * p.out_batch + head * p.out_head + columns.first;
    each_row(p, t, columns, x, [&](const Raw& raw, int token) {
      float y[COLUMNS];
      scaled(raw, token, y);
      const vec2 e4m3{cvt_e4m3x2(y[0], y[1]) | cvt_e4m3x2(y[2], y[3]) << 16,
                      cvt_e4m3x2(y[4], y[5]) | cvt_e4m3x2(y[6], y[7]) << 16};
      if (columns.there() && token < t.stored) st_global(out + (t.begin + token) * p.out_row, e4m3);
    });
  }
}

// Heads go through in batches 0, 1, ...: maxima of 0, maxima of 1, cast of 0, maxima of 2, cast of 1, ..., cast of the last.
// Grid: for each batch two rounds of p.batch_heads heads, for each head p.blocks blocks. OF_TOKEN: one round, the cast.
KERNEL __launch_bounds__(WARPS * 32) quantize(const __grid_constant__ QuantizeParams p) {
  const u32 items = u32(p.batch_heads * p.blocks), round = blockIdx.x / items, item = blockIdx.x % items;
  const u32 last = gridDim.x / items - 1;
  const bool casts = SCALE_OF == OF_TOKEN || (round % 2 == 0 && round > 0) || round == last;
  const u32 batch = SCALE_OF == OF_TOKEN ? round : round == last ? last / 2 : casts ? round / 2 - 1 : (round + 1) / 2;
  const u32 block = item % u32(p.blocks);
  const int head = int(batch * u32(p.batch_heads) + item / u32(p.blocks));
  if (head >= p.heads) return;  // the last batch may have fewer heads
  const Tokens t = tokens_of(p, block);
  const Columns columns(p, t.sequence, head);
  const char* x = p.x + t.batch * p.x_batch + head * p.x_head + columns.first * ELEMENT_BYTES;
  if (casts) {
    cast(p, t, columns, x, head, block);
  } else {
    find_maxima(p, t, columns, x, head);
  }
}

// Grid: num_scales / 256.
KERNEL __launch_bounds__(WARPS * 32) quantize_scales(const __grid_constant__ QuantizeParams p) {
  const i64 i = i64(blockIdx.x) * WARPS * 32 + threadIdx.x;
  if (i < p.num_scales) st_global(p.scale + i, float_as_u32(scale_of(ld_global<float>(p.scale + i))));
}
