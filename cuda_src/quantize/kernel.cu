// Quantisation to e4m3: x = scale * e4m3 with the largest magnitude at 448, for forward/fa3_fp8.
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Rotation: Shah et al. 2024, FlashAttention-3, section 3.3
// ("incoherent processing"). Mean keys: Zhang et al. 2024, SageAttention, section 4.2.
//
//   quantize_sums     SMOOTH: sums of rows of each chunk
//   quantize_mean     SMOOTH: the mean row of each head
//   quantize_maxima   the largest magnitude of what shares a scale, of smoothed and rotated rows
//   quantize_scales   scale = largest / 448
//   quantize_cast     e4m3 of rows / scale; TRANSPOSE: as columns, in the order of shared/value_tile.cuh
//
// cufa/run/cpu/quantize.py has the same arithmetic in the same order: scales and numbers agree bit by bit, except for means,
// whose float64 sums are added in another order. Subnormal float32 and bfloat16 are read as 0.
//
// A thread block has TOKENS tokens of a head, a thread eight columns of a row: loads of 16 bytes, stores of 8. The cast goes
// through the blocks from the last to the first, whose rows the maxima have left in the L2 cache. Measurements: NOTES.md.
#include "quantize/config.cuh"
#include "primitives/maximum.cuh"
#include "quantize/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK, OF_TOKEN };
constexpr int TOKENS = VALUE_KEYS, WARPS = 8, COLUMNS = 8;  // COLUMNS: of a thread
constexpr int LANES = lanes_of_row(HEAD_DIM), WARP_ROWS = 32 / LANES;
constexpr int STEPS = TOKENS / (WARPS * WARP_ROWS), IN_FLIGHT = STEPS < 4 ? STEPS : 4;
constexpr int SUM_COLUMNS = LANES * COLUMNS, CHUNKS = WARPS * 32 / SUM_COLUMNS;  // quantize_sums: a thread for each column
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
  int lane, first;  // its place among the lanes of a row, its first column
  u32 signs = 0;
  float mean[COLUMNS] = {};

  DEVICE Columns(const QuantizeParams& p, int sequence, int head) : lane(threadIdx.x % LANES), first(lane * COLUMNS) {
    if (ROTATE && there()) signs = u32(p.signs[lane / 8] >> lane % 8 * 8) & 0xff;
    if (SMOOTH && there() && sequence < p.sequences) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        mean[i] = ld_global<float>(p.mean + (i64(sequence) * p.heads + head) * HEAD_DIM + first + i);
      }
    }
  }
  DEVICE bool there() const { return first < HEAD_DIM; }

  // Float32, smoothed and rotated.
  DEVICE void prepare(const Raw& raw, float (&y)[COLUMNS]) const {
    u32 words[2 * ELEMENT_BYTES];
    memcpy(words, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      y[i] = ELEMENT_BYTES == 4 ? u32_as_float(words[i]) : SixteenBit<BFLOAT16>::widen(u16(words[i / 2] >> i % 2 * 16));
      if (SMOOTH) y[i] -= mean[i];
    }
    if constexpr (ROTATE) rotate(y);
  }

  // y diag(signs) H / sqrt(n), n the largest power of two that divides HEAD_DIM: a butterfly for each bit of the column.
  DEVICE void rotate(float (&y)[COLUMNS]) const {
    constexpr int n = HEAD_DIM & -HEAD_DIM;
    constexpr float root_2 = 0.70710678118654752f;
    constexpr float root = n == 16 ? 0.25f : n == 32 ? root_2 / 4 : n == 64 ? 0.125f : n == 128 ? root_2 / 8 : 0.0625f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) y[i] = u32_as_float(float_as_u32(y[i]) ^ (signs >> (COLUMNS - 1 - i) & 1) << 31);
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
    for (int distance = 1; distance < n / COLUMNS; distance *= 2) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        const float other = shfl_xor(y[i], distance);
        y[i] = other + (lane & distance ? -y[i] : y[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) y[i] *= root;
  }
};

DEVICE float inverse_scale(const QuantizeParams& p, const Tokens& t, int head, int token) {
  return 1.0f / ld_global<float>(p.scale + scale_index(p, t, head, token));
}

// ---- Kernels. Grid: (blocks of all sequences, heads)

KERNEL __launch_bounds__(WARPS * 32) quantize_sums(const __grid_constant__ QuantizeParams p) {
  const Tokens t = tokens_of(p, blockIdx.x);
  const int column = threadIdx.x % SUM_COLUMNS, chunk = threadIdx.x / SUM_COLUMNS;
  if (column >= HEAD_DIM) return;
  const char* x = p.x + t.batch * p.x_batch + blockIdx.y * p.x_head + column * ELEMENT_BYTES;
  double sum = 0;
#pragma unroll 8
  for (int i = chunk; i < TOKENS; i += CHUNKS) {
    if (!t.exists(t.first + i)) continue;
    const char* at = x + (t.begin + t.first + i) * p.x_row;
    sum += ELEMENT_BYTES == 4 ? ld_global<float>(at) : SixteenBit<BFLOAT16>::widen(ld_global<u16>(at));
  }
  st_global(p.sums + ((i64(blockIdx.x) * p.heads + blockIdx.y) * CHUNKS + chunk) * HEAD_DIM + column, sum);
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
  for (i64 block = first; block < first + (rows + TOKENS - 1) / TOKENS; ++block) {
    const double* sums = p.sums + (block * p.heads + blockIdx.y) * CHUNKS * HEAD_DIM + column;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) sum += ld_global<double>(sums + chunk * HEAD_DIM);
  }
  st_global(p.mean + (i64(sequence) * p.heads + blockIdx.y) * HEAD_DIM + column, rows ? float(sum / rows) : 0.0f);
}

KERNEL __launch_bounds__(WARPS * 32) quantize_maxima(const __grid_constant__ QuantizeParams p) {
  const Tokens t = tokens_of(p, blockIdx.x);
  const int head = blockIdx.y, row = threadIdx.x / LANES;
  const Columns columns(p, t.sequence, head);
  const char* x = p.x + t.batch * p.x_batch + head * p.x_head + columns.first * ELEMENT_BYTES;
  u32 top = 0;
  for (int step = 0; step < STEPS; step += IN_FLIGHT) {
    Raw raw[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int token = t.first + row + (step + i) * WARPS * WARP_ROWS;
      raw[i] = load(x + (t.begin + token) * p.x_row, columns.there() && t.exists(token));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int token = t.first + row + (step + i) * WARPS * WARP_ROWS;
      float y[COLUMNS];
      columns.prepare(raw[i], y);
      u32 largest = 0;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) largest = max(largest, float_as_u32(y[c]) & 0x7fffffff);
      if (!t.exists(token)) largest = 0;  // its mean is not 0
      top = max(top, largest);
      if constexpr (SCALE_OF >= OF_BLOCK) {
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) largest = max(largest, shfl_xor(largest, distance));
        if (columns.lane == 0 && largest > 0) red_max_u32(p.scale + scale_index(p, t, head, token), largest);
      }
    }
  }
  if constexpr (SCALE_OF < OF_BLOCK) {
    top = redux_max(top);
    if (threadIdx.x % 32 == 0 && top > 0) red_max_u32(p.scale + scale_index(p, t, head, 0), top);
  }
}

// In place. NaN and infinity remain: the host does not see them. Grid: num_scales / 256.
KERNEL __launch_bounds__(WARPS * 32) quantize_scales(const __grid_constant__ QuantizeParams p) {
  const i64 i = i64(blockIdx.x) * WARPS * 32 + threadIdx.x;
  if (i >= p.num_scales) return;
  const float largest = ld_global<float>(p.scale + i), scale = largest / LARGEST;
  constexpr float smallest = 1.17549435e-38f;
  st_global(p.scale + i, float_as_u32(largest == 0.0f ? 1.0f : scale < smallest ? smallest : scale));
}

KERNEL __launch_bounds__(WARPS * 32) quantize_cast(const __grid_constant__ QuantizeParams p) {
  const u32 block = gridDim.x - 1 - blockIdx.x;
  const Tokens t = tokens_of(p, block);
  const int head = gridDim.y - 1 - blockIdx.y, row = threadIdx.x / LANES;
  const Columns columns(p, t.sequence, head);
  const char* x = p.x + t.batch * p.x_batch + head * p.x_head + columns.first * ELEMENT_BYTES;
  const float inverse = SCALE_OF < OF_BLOCK && t.rows > 0 ? inverse_scale(p, t, head, 0) : 0;
  auto scaled = [&](const Raw& raw, int token, float (&y)[COLUMNS]) {
    columns.prepare(raw, y);
    const float by = SCALE_OF < OF_BLOCK || !t.exists(token) ? inverse : inverse_scale(p, t, head, token);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) y[c] = t.exists(token) ? y[c] * by : 0.0f;
  };
  if constexpr (TRANSPOSE) {
    DYN_SMEM(start);
    const ValueTile<HEAD_DIM, WARPS> tile{smem_address(start)};
    for (int word = row; word < VALUE_WORDS; word += WARPS * WARP_ROWS) {
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
    return;
  }
  char* out = p.out + t.batch * p.out_batch + head * p.out_head + columns.first;
  for (int step = 0; step < STEPS; step += IN_FLIGHT) {
    Raw raw[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int token = t.first + row + (step + i) * WARPS * WARP_ROWS;
      raw[i] = load(x + (t.begin + token) * p.x_row, columns.there() && t.exists(token));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int token = t.first + row + (step + i) * WARPS * WARP_ROWS;
      float y[COLUMNS];
      scaled(raw[i], token, y);
      const vec2 e4m3{cvt_e4m3x2(y[0], y[1]) | cvt_e4m3x2(y[2], y[3]) << 16,
                      cvt_e4m3x2(y[4], y[5]) | cvt_e4m3x2(y[6], y[7]) << 16};
      if (columns.there() && token < t.stored) st_global(out + (t.begin + token) * p.out_row, e4m3);
    }
  }
}
