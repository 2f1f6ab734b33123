// Quantisation to e4m3: x = scale * e4m3 with the largest magnitude at 448, for forward/fa3_fp8.
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Rotation: Shah et al. 2024, FlashAttention-3, section 3.3
// ("incoherent processing"). Mean keys: Zhang et al. 2024, SageAttention, section 4.2.
//
//   quantize_sums    SMOOTH: sums of rows of each block
//   quantize_mean    SMOOTH: the mean row of each head
//   quantize         the largest magnitude of what shares a scale, of smoothed and rotated rows; then rows / scale in e4m3, with
//                    TRANSPOSE as columns in the order of shared/value_tile.cuh
//   quantize_late    scale = largest / 448; e4m3 of the blocks that have not waited for their maxima
//
// cufa/run/cpu/quantize.py has the same arithmetic in the same order: scales and numbers agree bit by bit, except for means,
// whose float64 sums are added in another order. Subnormal float32 and bfloat16 are read as 0.
//
// A thread block has TOKENS tokens of a head, a thread eight columns of four of them, in registers: rows are read from memory
// once. A block waits until all blocks that share its scale have found their maxima, but only p.patience times: they may not
// be running, as when a head is longer than a GPU has room for, or when other streams share the GPU. Blocks that give up are
// listed, and quantize_late reads their rows again. Measurements: NOTES.md.
#include "quantize/config.cuh"
#include "primitives/grid.cuh"
#include "primitives/maximum.cuh"
#include "primitives/semaphore.cuh"
#include "quantize/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK, OF_TOKEN };
constexpr int TOKENS = 64, COLUMNS = 8, ROWS = 4;  // of a thread block; of a thread
constexpr int LANES = lanes_of_row(HEAD_DIM), GROUPS = TOKENS / ROWS, THREADS = LANES * GROUPS;
constexpr int BLOCKS_PER_SM = 1024 / THREADS;
constexpr int NO_MEAN = -1;  // of a sequence
constexpr float LARGEST = 448.0f;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: rows are whole vectors, of at most one warp");
static_assert(SCALE_BLOCK >= TOKENS, "SCALE_BLOCK: a thread block has tokens of at most two blocks");
using Tile = ValueTile<HEAD_DIM, TOKENS / 4, THREADS>;
using Numbers = float[ROWS][COLUMNS];

// ---- Tokens of a block

struct Tokens {
  u32 block;            // of its head
  int head, sequence, first;  // the block's first token, counted in its sequence
  int rows, stored;     // of the sequence: tokens; tokens and padding
  i64 batch, begin;     // where the sequence begins in x

  // A thread's tokens. TRANSPOSE: those of a word.
  DEVICE int token(int i) const {
    const int group = threadIdx.x / LANES;
    return first + (TRANSPOSE ? first_key_of_word(group) + key_of_word(i) : group + i * GROUPS);
  }
  DEVICE bool exists(int token) const { return token < rows; }
};

// Blocks are numbered head by head. Sequences begin with even blocks, as V^T has positions for VALUE_KEYS keys at a time.
DEVICE Tokens tokens_of(const QuantizeParams& p, u32 number) {
  const int seqlen = int(p.seqlen), sequences = int(p.sequences), head = int(number / u32(p.blocks));
  const u32 block = number % u32(p.blocks);
  if constexpr (LENGTHS_KIND == PACKED) {
    const PackedBlock at = packed_block<VALUE_KEYS>(p.lengths, sequences, seqlen, block / 2);
    const bool behind = at.sequence == sequences;  // the rest of the array
    const int begin = within(ld_global<i32>(p.lengths + at.sequence), seqlen);
    const int end = behind ? seqlen : within(ld_global<i32>(p.lengths + at.sequence + 1), seqlen);
    const int stored = max(end - begin, 0);
    return {block, head, at.sequence, at.block * VALUE_KEYS + int(block % 2) * TOKENS, behind ? 0 : stored, stored, 0, begin};
  }
  const int blocks = (seqlen + VALUE_KEYS - 1) / VALUE_KEYS * 2, sequence = int(block) / blocks;
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

// Thread blocks that share the scale of a token.
DEVICE u32 sharing_blocks(const QuantizeParams& p, const Tokens& t, int token) {
  if constexpr (SCALE_OF == OF_TENSOR) {
    return u32(p.blocks * p.heads);
  } else {
    const int length = SCALE_OF == OF_HEAD ? t.rows : SCALE_BLOCK, first = token / length * length;
    return u32((min(first + length, t.rows) - 1) / TOKENS - first / TOKENS + 1);
  }
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

  // `sequence`: whose mean is subtracted.
  DEVICE Columns(const QuantizeParams& p, const Tokens& t, int sequence) : lane(threadIdx.x % LANES), first(lane * COLUMNS) {
    if (!there()) return;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      if (ROTATE) signs[i] = u32(p.signs[lane / 8] >> (lane % 8 * 8 + COLUMNS - 1 - i)) << 31;
      if (SMOOTH && sequence != NO_MEAN && sequence < p.sequences) {
        mean[i] = ld_global<float>(p.mean + (i64(sequence) * p.heads + t.head) * HEAD_DIM + first + i);
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

  // Float32, smoothed and rotated.
  DEVICE void prepare(const Raw& raw, float (&y)[COLUMNS]) const {
    unpack(raw, y);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      if (SMOOTH) y[i] -= mean[i];
      if (ROTATE) y[i] = u32_as_float(float_as_u32(y[i]) ^ signs[i]);
    }
    if constexpr (ROTATE) rotate(y);
  }

  // y H / sqrt(N) for each N columns: a butterfly for each bit of the column.
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
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) y[i] *= ROOT;
  }
};

// Bits of the largest magnitude of a row's columns.
DEVICE u32 largest_of(const float (&y)[COLUMNS]) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) found = max(found, float_as_u32(y[i]) & 0x7fffffff);
  return found;
}

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

// A thread's rows as they lie in memory.
DEVICE void load_rows(const QuantizeParams& p, const Tokens& t, const Columns& columns, Raw (&raw)[ROWS]) {
  const char* x = p.x + t.batch * p.x_batch + t.head * p.x_head + columns.first * ELEMENT_BYTES;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    raw[i] = load(x + (t.begin + t.token(i)) * p.x_row, columns.there() && t.exists(t.token(i)));
  }
}

// ---- Means. Grid: blocks of all heads

KERNEL __launch_bounds__(THREADS) quantize_sums(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(sums_start);
  const u32 smem = smem_address(sums_start);  // GROUPS rows of HEAD_DIM sums
  auto place = [&](int group, int column) { return smem + (group * HEAD_DIM + column) * 8; };
  const Tokens t = tokens_of(p, blockIdx.x);
  const Columns columns(p, t, NO_MEAN);
  Raw raw[ROWS];
  float y[ROWS][COLUMNS];
  load_rows(p, t, columns, raw);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) columns.unpack(raw[i], y[i]);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const double sum = double(y[0][c]) + y[1][c] + y[2][c] + y[3][c];
    vec2 bits;
    memcpy(&bits, &sum, 8);
    if (columns.there()) st_shared_vec2(place(threadIdx.x / LANES, columns.first + c), bits);
  }
  block_sync();  // each thread has stored its sums
  for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS) {
    double sum = 0;
    for (int group = 0; group < GROUPS; ++group) {
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
  i64 first = i64(sequence) * ((rows + VALUE_KEYS - 1) / VALUE_KEYS * 2);
  if (LENGTHS_KIND == PADDED) rows = within(ld_global<i32>(p.lengths + sequence), rows);
  if (LENGTHS_KIND == PACKED) {
    const int begin = within(ld_global<i32>(p.lengths + sequence), rows);
    first = i64(first_packed_block<VALUE_KEYS>(begin, sequence)) * 2;
    rows = max(within(ld_global<i32>(p.lengths + sequence + 1), rows) - begin, 0);
  }
  const double* sums = p.sums + (blockIdx.y * p.blocks + first) * HEAD_DIM + column;
  double sum = 0;
#pragma unroll 16
  for (int block = 0; block < (rows + TOKENS - 1) / TOKENS; ++block) sum += ld_global<double>(sums + i64(block) * HEAD_DIM);
  st_global(p.mean + (i64(sequence) * p.heads + blockIdx.y) * HEAD_DIM + column, rows ? float(sum / rows) : 0.0f);
}

// ---- e4m3

DEVICE void prepare_rows(const QuantizeParams& p, const Tokens& t, const Columns& columns, Numbers& y) {
  Raw raw[ROWS];
  load_rows(p, t, columns, raw);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) columns.prepare(raw[i], y[i]);
}

// y / scale, in place of x. `scale_of_token(i)`: of the thread's token i.
template <typename Function>
DEVICE void cast(const QuantizeParams& p, const Tokens& t, const Columns& columns, Numbers& y, u32 smem,
                 Function scale_of_token) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const bool exists = t.exists(t.token(i));
    const float inverse = exists ? 1.0f / scale_of_token(i) : 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) y[i][c] = exists ? y[i][c] * inverse : 0.0f;
  }
  char* out = p.out + t.batch * p.out_batch + t.head * p.out_head;
  if constexpr (TRANSPOSE) {
    const Tile tile{smem};
    u32 keys[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) keys[c] = cvt_e4m3x2(y[0][c], y[1][c]) | cvt_e4m3x2(y[2][c], y[3][c]) << 16;
    if (columns.there()) tile.write(columns.first, threadIdx.x / LANES, keys);
    block_sync();  // the tile is complete
    if (LENGTHS_KIND == PACKED && t.block / 2 >= p.seqlen / VALUE_KEYS + p.sequences) return;  // V^T has no such positions
    tile.store(out + (LENGTHS_KIND == PACKED ? i64(t.block) * TOKENS : t.first), p.out_row);
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const vec2 e4m3{cvt_e4m3x2(y[i][0], y[i][1]) | cvt_e4m3x2(y[i][2], y[i][3]) << 16,
                      cvt_e4m3x2(y[i][4], y[i][5]) | cvt_e4m3x2(y[i][6], y[i][7]) << 16};
      if (columns.there() && t.token(i) < t.stored) st_global(out + (t.begin + t.token(i)) * p.out_row + columns.first, e4m3);
    }
  }
}

// With the maxima complete.
DEVICE void cast_by_maxima(const QuantizeParams& p, const Tokens& t, const Columns& columns, Numbers& y, u32 smem) {
  auto found = [&](int token) { return scale_of(ld_global<float>(p.largest + scale_index(p, t, token))); };
  const float of_head = SCALE_OF < OF_BLOCK && t.exists(t.first) ? found(0) : 1.0f;
  cast(p, t, columns, y, smem, [&](int i) { return SCALE_OF < OF_BLOCK ? of_head : found(t.token(i)); });
}

// The maxima of a block to p.largest. False if those of other blocks are awaited in vain.
DEVICE bool share_maxima(const QuantizeParams& p, const Tokens& t, const u32 (&largest)[ROWS], u32 flag) {
  // The block's first token, and the first of the next block of SCALE_BLOCK tokens.
  const int tokens[2] = {t.first, SCALE_OF == OF_BLOCK ? (t.first / SCALE_BLOCK + 1) * SCALE_BLOCK : t.rows};
  u32 top[2] = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const bool next = SCALE_OF == OF_BLOCK && t.token(i) >= tokens[1];
    top[0] = max(top[0], next ? 0 : largest[i]);
    top[1] = max(top[1], next ? largest[i] : 0);
  }
  auto each_scale = [&](auto f) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (t.exists(tokens[i]) || (SCALE_OF == OF_TENSOR && i == 0)) f(i);
      if (SCALE_OF != OF_BLOCK || tokens[1] >= t.first + TOKENS) return;
    }
  };
  top[0] = redux_max(top[0]);
  if (SCALE_OF == OF_BLOCK) top[1] = redux_max(top[1]);
  if (threadIdx.x % 32 == 0) {
    each_scale([&](int i) {
      if (top[i] > 0) red_max_u32(p.largest + scale_index(p, t, tokens[i]), top[i]);
    });
  }
  block_sync();  // all warps have added their maxima
  if (threadIdx.x == 0) {
    each_scale([&](int i) { red_release_gpu_add(p.arrived + scale_index(p, t, tokens[i]), 1); });
    bool complete = true;
    each_scale([&](int i) {
      const u32* arrived = p.arrived + scale_index(p, t, tokens[i]);
      const u32 all = sharing_blocks(p, t, tokens[i]);
      bool found = false;
      for (i64 look = 0; look < p.patience && !found; ++look) found = ld_acquire_gpu(arrived) == all;
      complete &= found;
    });
    st_shared_u32(flag, complete);
  }
  block_sync();  // the maxima are complete, or not
  return ld_shared_u32(flag) != 0;
}

// Grid: blocks of all heads.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM) quantize(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(start);
  const u32 smem = smem_address(start), flag = smem + (TRANSPOSE ? Tile::BYTES : 0);
  const Tokens t = tokens_of(p, blockIdx.x);
  const Columns columns(p, t, t.sequence);
  Numbers y;
  prepare_rows(p, t, columns, y);
  u32 largest[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) largest[i] = t.exists(t.token(i)) ? largest_of(y[i]) : 0;
  if constexpr (SCALE_OF == OF_TOKEN) {
    float scales[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      scales[i] = scale_of(u32_as_float(largest_of_row(largest[i])));
      if (columns.lane == 0 && t.token(i) < t.stored) st_global(p.scale + scale_index(p, t, t.token(i)), scales[i]);
    }
    cast(p, t, columns, y, smem, [&](int i) { return scales[i]; });
  } else if (share_maxima(p, t, largest, flag)) {
    cast_by_maxima(p, t, columns, y, smem);
  } else if (threadIdx.x == 0) {
    st_global(p.late + 1 + atomic_inc_wrap(p.late, ~0u), blockIdx.x);
  }
}

// Grid: any.
KERNEL __launch_bounds__(THREADS) quantize_late(const __grid_constant__ QuantizeParams p) {
  DYN_SMEM(start);
  for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < p.num_scales; i += i64(gridDim.x) * THREADS) {
    st_global(p.scale + i, scale_of(ld_global<float>(p.largest + i)));
  }
  const u32 count = ld_global<u32>(p.late);
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    const Tokens t = tokens_of(p, ld_global<u32>(p.late + 1 + i));
    const Columns columns(p, t, t.sequence);
    Numbers y;
    prepare_rows(p, t, columns, y);
    block_sync();  // the previous block's tile has been read
    cast_by_maxima(p, t, columns, y, smem_address(start));
  }
}
