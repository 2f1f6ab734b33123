// The tokens of a thread block of the quantiser, and what each thread holds of their rows: loads, magnitudes, the rotation.
#pragma once
#include "quantize/params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK, OF_TOKEN };
constexpr int TOKENS = 64, COLUMNS = 8;  // tokens of a block; columns of a vector
constexpr int BLOCKS_OF_KEYS = VALUE_KEYS / TOKENS;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: a multiple of 16, at most 256: one vector for each lane");
static_assert(SCALE_BLOCK >= TOKENS, "SCALE_BLOCK: 64 tokens of a thread block may touch at most two blocks that have scales");

// ---- Tokens of a block

struct Tokens {
  u32 block;            // index of the block in its head
  int head, sequence;
  int first;            // the block's first token, counted from the sequence's first
  int rows, stored;     // tokens of the sequence, without and with padding
  i64 batch, begin;     // batch entry of x, and row in it, of the sequence's first token

  DEVICE bool exists(int token) const { return token < rows; }
  DEVICE i64 index(const QuantizeParams& p) const { return i64(head) * p.blocks + block; }
};

// Blocks are numbered head by head. Each sequence takes a multiple of VALUE_KEYS tokens, padding included, as in V^T.
DEVICE Tokens tokens_of(const QuantizeParams& p, u32 index) {
  const int seqlen = int(p.seqlen), sequences = int(p.sequences), head = int(index / u32(p.blocks));
  const u32 block = index % u32(p.blocks);
  if constexpr (LENGTHS_KIND == PACKED) {
    const PackedBlock at = packed_block<VALUE_KEYS>(p.lengths, sequences, seqlen, block / BLOCKS_OF_KEYS);
    const bool past_last = at.sequence == sequences;  // padding after the last sequence
    const int begin = within(ld_global<i32>(p.lengths + at.sequence), seqlen);
    const int end = past_last ? seqlen : within(ld_global<i32>(p.lengths + at.sequence + 1), seqlen);
    const int stored = max(end - begin, 0);
    return {block,  head, at.sequence, at.block * VALUE_KEYS + int(block % BLOCKS_OF_KEYS) * TOKENS, past_last ? 0 : stored,
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

// Eight columns as raw bits; zeros if the vector does not exist.
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

// What one thread holds of a block of tokens: VECTORS vectors of each of ROWS rows. LANES threads share a row.
template <int LANES, int ROWS>
struct ThreadRows {
  static constexpr int LANE_GROUPS = TOKENS / ROWS, THREADS = LANES * LANE_GROUPS;
  static constexpr int VECTORS = (HEAD_DIM + COLUMNS * LANES - 1) / (COLUMNS * LANES);
  static constexpr int N = HEAD_DIM & -HEAD_DIM;  // order of H: the largest power of two that divides HEAD_DIM
  static constexpr int H_LANES = N / COLUMNS < LANES ? N / COLUMNS : LANES;  // lanes that hold N columns
  static constexpr int H_VECTORS = N / (COLUMNS * LANES);                    // vectors of each of these lanes; 0: H_LANES < LANES
  static constexpr float INVERSE_ROOT_2 = 0.70710678118654752f;
  static constexpr float INVERSE_ROOT =  // 1 / sqrt(N)
      N == 16 ? 0.25f : N == 32 ? INVERSE_ROOT_2 / 4 : N == 64 ? 0.125f : N == 128 ? INVERSE_ROOT_2 / 8 : 0.0625f;
  using Row = float[VECTORS][COLUMNS];
  using RawRow = Raw[VECTORS];

  const QuantizeParams& p;
  const Tokens t;
  const int lane = threadIdx.x % LANES, lane_group = threadIdx.x / LANES;

  DEVICE int column(int vector) const { return (vector * LANES + lane) * COLUMNS; }
  DEVICE bool has_vector(int vector) const { return column(vector) < HEAD_DIM; }
  // Token of row i of this thread. TRANSPOSE: its four rows are the keys of one word of V^T.
  DEVICE int token(int i) const {
    return t.first + (TRANSPOSE ? first_key_of_word(lane_group) + key_of_word(i) : lane_group + i * LANE_GROUPS);
  }

  DEVICE void load_rows(RawRow (&raw)[ROWS]) const {
    const char* x = p.x + t.batch * p.x_batch + t.head * p.x_head;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const char* row = x + (t.begin + token(i)) * p.x_row;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) raw[i][v] = load(row + column(v) * ELEMENT_BYTES, has_vector(v) && t.exists(token(i)));
    }
  }

  // A row in float32; SMOOTH: minus the mean row.
  DEVICE void widen(const RawRow& raw, Row& y) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack(raw[v], y[v]);
      if (!SMOOTH || !has_vector(v) || t.sequence >= p.sequences) continue;
      const float* mean = p.mean + (i64(t.sequence) * p.heads + t.head) * HEAD_DIM + column(v);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) y[v][i] -= ld_global<float>(mean + i);
    }
  }

  // The largest magnitude of this thread's columns of a row, as bits of a float. ROTATE: sum |y| / sqrt(N), a bound.
  DEVICE u32 largest(const RawRow& raw) const {
    Row y;
    widen(raw, y);
    u32 found = 0;
    if constexpr (ROTATE) {
      float sums[VECTORS];
      row_sums(y, sums);
#pragma unroll
      for (int v = 0; v < VECTORS; v += H_VECTORS > 0 ? H_VECTORS : 1) found = max(found, float_as_u32(sums[v] * INVERSE_ROOT));
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) found = max(found, float_as_u32(y[v][i]) & 0x7fffffff);
      }
    }
    return found;
  }
  // sums[v] = sum |y| over the N columns from vector v on, if v is a multiple of H_VECTORS. The same in H_LANES lanes.
  DEVICE void row_sums(const Row& y, float (&sums)[VECTORS]) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float a[COLUMNS];
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) a[i] = fabsf(y[v][i]);
      sums[v] = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
#pragma unroll
      for (int distance = 1; distance < H_LANES; distance *= 2) sums[v] += shfl_xor(sums[v], distance);
    }
#pragma unroll
    for (int distance = 1; distance < H_VECTORS; distance *= 2) {
#pragma unroll
      for (int v = 0; v + distance < VECTORS; v += 2 * distance) sums[v] += sums[v + distance];
    }
  }
  // Maximum over the lanes of a row.
  DEVICE u32 largest_of_row(u32 x) const {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) x = max(x, shfl_xor(x, distance));
    return x;
  }

  // y = y diag(signs) H for each N columns, by a butterfly for each bit of a column's index within the N. (H is not scaled.)
  DEVICE void rotate(Row& y) const {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int vector = v * LANES + lane;
      const u32 signs = has_vector(v) ? u32(p.signs[vector / 8] >> vector % 8 * 8) << 24 : 0;
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
      for (int distance = 1; distance < H_LANES; distance *= 2) {
        const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) y[v][i] = fmaf(sign, y[v][i], shfl_xor(y[v][i], distance));
      }
    }
#pragma unroll
    for (int distance = 1; distance < H_VECTORS; distance *= 2) {
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
