// V^T in e4m3: a row for each column of V, keys along rows. Each 32 keys are in the order in which the packed accumulators of S
// are the operand P (cufa/problem/float8.py, KEY_ORDER). A word of V^T has four keys.
#pragma once
#include "primitives/float8.cuh"
#include "primitives/primitives.cuh"

constexpr int VALUE_KEYS = 128, VALUE_WORDS = VALUE_KEYS / 4;  // rows of V^T are whole lines of 128 bytes

// Lanes that share a row, eight columns each: a power of two. Those past HEAD_DIM have no columns.
constexpr int lanes_of_row(int head_dim) { return head_dim <= 16 ? 2 : 2 * lanes_of_row((head_dim + 1) / 2); }

// The first key of word w in its tile; its other keys are 1, 8 and 9 keys further.
DEVICE int first_key_of_word(int w) { return w / 8 * 32 + w % 8 / 4 * 16 + w % 4 * 2; }
DEVICE int key_of_word(int i) { return i / 2 * 8 + i % 2; }

// A tile of WORDS words, or 4 WORDS keys, in shared memory: a row of words for each column of V. Words are swizzled by
// column, so that lanes of a warp that write different columns or words use different banks.
template <int HEAD_DIM, int WORDS, int THREADS>
struct ValueTile {
  static constexpr int LANES = lanes_of_row(HEAD_DIM), BYTES = HEAD_DIM * WORDS * 4;
  u32 smem;

  DEVICE u32 place(int column, int word) const {
    return smem + (column * WORDS + (word ^ column / 8 * (32 / LANES) % WORDS)) * 4;
  }
  // Four keys of eight columns, from the first column on.
  DEVICE void write(int column, int word, const u32 (&keys)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) st_shared_u32(place(column + i, word), keys[i]);
  }
  // The whole tile to V^T, whose rows are `stride` bytes apart.
  DEVICE void store(char* global, i64 stride) const {
    constexpr int COLUMNS_AT_ONCE = THREADS / WORDS;
    static_assert(THREADS % WORDS == 0, "each thread stores one word of several columns");
    const int word = threadIdx.x % WORDS;
    global += threadIdx.x / WORDS * stride + word * 4;
#pragma unroll 8
    for (int column = threadIdx.x / WORDS; column < HEAD_DIM; column += COLUMNS_AT_ONCE) {
      st_global(global, ld_shared_u32(place(column, word)));
      global += COLUMNS_AT_ONCE * stride;
    }
  }
};
