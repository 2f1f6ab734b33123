// Makes the bits of masks (shared/bit_mask.cuh). mask_bits: from a function of sequence, head, query and key (cufa.masks.where),
// printed before this file by cufa/build/score_text.py; 0: the query sees the key. transpose_bits: by key, from bits by row.
//
// A warp makes a square of 32 rows and 32 keys. Its lane computes a key's bits for all rows, so that arrays are read along keys;
// five exchanges of half the bits transpose the square.
#include "primitives/primitives.cuh"
#include "shared/score_params.cuh"

constexpr int BITS_WARPS = 8;  // warps of a thread block

struct BitsParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  ScoreArray array0, array1, array2, array3;
  const u32* by_row;  // the input of transpose_bits
  u32* words;         // the result: (batch, heads, rows, words of keys), by key (batch, heads, keys, words of rows)
  i64 batch, heads, rows, keys, delta;
  const i32 *cu_rows, *cu_keys;  // packed sequences: where each begins, and the end of the last; else null
  i64 sequences;                 // of one matrix; 0: each sequence has a matrix
};

// Transposes 32 x 32 bits over the lanes of a warp: bit n of lane m becomes bit m of lane n.
DEVICE u32 turned(u32 x) {
  u32 low = 0x0000ffffu;  // the bits that a lane of the first half keeps
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const u32 other = shfl_xor(x, half);
    x = (lane_id() & half) == 0 ? (x & low) | (other & low) << half : (x & ~low) | (other & ~low) >> half;
    low ^= low << (half / 2);
  }
  return x;
}

// The square of a warp: `top` and `left` are its first row and key. Neighbouring warps have neighbouring keys.
struct Square {
  i64 head;  // index of the head over all sequences
  int top, left;

  DEVICE explicit Square(const BitsParams& p) {
    const i64 across = (p.keys + 31) / 32, down = (p.rows + 31) / 32;
    const i64 index = i64(blockIdx.x) * BITS_WARPS + threadIdx.x / 32;
    head = index / (across * down);
    top = int(index / across % down) * 32;
    left = int(index % across) * 32;
  }
  // Index of the word that holds this lane's row of the square.
  DEVICE i64 word_of_row(const BitsParams& p) const {
    return (head * p.rows + top + lane_id()) * ((p.keys + 31) / 32) + left / 32;
  }
  DEVICE bool exists(const BitsParams& p) const { return head < p.batch * p.heads; }
};

// The sequence of a key, and its rows and keys in the matrix.
struct SequenceOfKey {
  int index, delta, first_key = 0, first_row = 0, end_row;

  DEVICE SequenceOfKey(const BitsParams& p, int of_matrix, int key)
      : index(of_matrix), delta(int(p.delta)), end_row(int(p.rows)) {
    if (p.cu_keys == nullptr) return;
    if (p.sequences == 0) {
      const int keys = ld_global<i32>(p.cu_keys + index + 1) - ld_global<i32>(p.cu_keys + index);
      end_row = ld_global<i32>(p.cu_rows + index + 1) - ld_global<i32>(p.cu_rows + index);
      delta = keys - end_row;
      if (key >= keys) end_row = 0;
      return;
    }
    index = 0;  // the last sequence that begins at the key or before
    for (int behind = int(p.sequences); behind - index > 1;) {
      const int middle = (index + behind) / 2;
      (ld_global<i32>(p.cu_keys + middle) <= key ? index : behind) = middle;
    }
    first_key = ld_global<i32>(p.cu_keys + index), first_row = ld_global<i32>(p.cu_rows + index);
    const int end_key = ld_global<i32>(p.cu_keys + index + 1);
    end_row = ld_global<i32>(p.cu_rows + index + 1);
    delta = end_key - first_key - (end_row - first_row);
    if (key >= end_key) end_row = first_row;  // padding after the last sequence
  }
};

#ifdef CUFA_SCORE
KERNEL __launch_bounds__(BITS_WARPS * 32) mask_bits(const __grid_constant__ BitsParams p) {
  const Square square(p);
  if (!square.exists(p)) return;
  const int key = square.left + lane_id();
  const SequenceOfKey own(p, int(square.head / p.heads), key);
  const ScoreFunction<BitsParams> function(p, own.index, int(square.head % p.heads), own.delta);
  const auto column = function.column(key - own.first_key, float(key - own.first_key));
  const int begin = own.first_row - square.top, end = own.end_row - square.top;  // the rows of the key's sequence
  u32 of_key = 0;
  if (warp_any(begin < 32 && end > 0)) {
#pragma unroll 8
    for (int r = 0; r < 32; ++r) {
      const int row = square.top + r - own.first_row;
      const bool exists = r >= begin && r < end;
      const bool seen = exists && function.template value<false>(0.0f, function.row(row, float(row)), column) == 0.0f;
      of_key |= u32(seen) << r;
    }
  }
  const u32 of_row = turned(key < p.keys ? of_key : 0);
  if (square.top + lane_id() < p.rows) st_global(p.words + square.word_of_row(p), of_row);
}
#endif

KERNEL __launch_bounds__(BITS_WARPS * 32) transpose_bits(const __grid_constant__ BitsParams p) {
  const Square square(p);
  if (!square.exists(p)) return;
  const i64 key = square.left + lane_id();
  const u32 of_key = turned(square.top + lane_id() < p.rows ? ld_global<u32>(p.by_row + square.word_of_row(p)) : 0);
  if (key < p.keys) st_global(p.words + (square.head * p.keys + key) * ((p.rows + 31) / 32) + square.top / 32, of_key);
}
