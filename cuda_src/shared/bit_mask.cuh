// Masks with one bit for each score: the device side of cufa/problem/bits.py. Bit n of a word is the n-th of 32 neighbours on a
// line: of 32 keys of a row, or, for kernels that keep a block of keys, of 32 rows of a key.
//
// Before the kernel, prepare_bits() finds for each tile whether some score and whether every score is visible: two bytes for each
// group of CLASS_ROWS rows and block of BLOCK_KV keys. Every call does so: the bits are on the GPU and may change.
#pragma once
#include "shared/params.cuh"
#include "shared/fragment_view.cuh"

constexpr int CLASS_ROWS = BLOCK_Q % 64 == 0 ? 64 : BLOCK_Q;
constexpr u32 SOME_SCORE = 1, EVERY_SCORE = 2;

// Bits and tile classes of all heads of the mask.
template <typename Params>
struct BitMask {
  static constexpr bool BY_KEY = LINES_ARE_KEYS<Params>;

  char *words, *classes;
  int words_of_line, groups, blocks;

  DEVICE explicit BitMask(const Params& p)
      : words(reinterpret_cast<char*>(const_cast<i32*>(p.mask.runs))),
        classes(static_cast<char*>(p.workspace) + p.mask.workspace),
        words_of_line(p.mask.keys), groups((p.seqlen_q - 1) / CLASS_ROWS + 1), blocks((p.seqlen_k - 1) / BLOCK_KV + 1) {}

  DEVICE i64 bytes_of_head(const Params& p) const { return i64(BY_KEY ? p.seqlen_k : p.seqlen_q) * words_of_line * 4; }
  DEVICE i64 classes_of_head() const { return i64(groups) * blocks; }
};

// Bits begin ... end-1 of word `word` of a line.
DEVICE u32 bits_between(int word, int begin, int end) {
  const int low = max(begin - 32 * word, 0), high = min(end - 32 * word, 32);
  return low >= high ? 0 : (0xffffffffu >> (32 - (high - low))) << low;
}

// Classifies the tiles, which `num_warps` warps share. Called by all lanes of warp `warp`.
template <typename Params>
DEVICE void prepare_bits(const Params& p, int warp, int num_warps) {
  const BitMask<Params> mask(p);
  const i64 of_head = mask.classes_of_head(), total = i64(p.mask.sequences) * p.mask.heads * of_head;
  for (i64 index = warp; index < total; index += num_warps) {
    const int tile = int(index % of_head), top = tile / mask.blocks * CLASS_ROWS, left = tile % mask.blocks * BLOCK_KV;
    const int bottom = min(top + CLASS_ROWS, p.seqlen_q), right = min(left + BLOCK_KV, p.seqlen_k);
    constexpr bool BY_KEY = BitMask<Params>::BY_KEY;
    const int first_line = BY_KEY ? left : top, end_line = BY_KEY ? right : bottom;
    const int begin = BY_KEY ? top : left, end = BY_KEY ? bottom : right;
    const char* words = mask.words + index / of_head * mask.bytes_of_head(p);
    bool some = false, every = true;
    for (int line = first_line + lane_id(); line < end_line; line += 32) {
      for (int word = begin / 32; 32 * word < end; ++word) {
        const u32 wanted = bits_between(word, begin, end);
        const u32 bits = ld_global<u32>(words + (i64(line) * mask.words_of_line + word) * 4) & wanted;
        some = some || bits != 0;
        every = every && bits == wanted;
      }
    }
    const u32 of_tile = (warp_any(some) ? SOME_SCORE : 0) | (warp_any(!every) ? 0 : EVERY_SCORE);
    if (lane_id() == 0) st_global(mask.classes + 2 * index, u16(of_tile));
  }
}

// Scores whose bit is 0 become -inf, as do scores past the end. `line` is the lane's first row of the view, `place` its first
// column; the mask has `lines` lines. The view begins at a multiple of its columns.
template <typename View>
DEVICE void hide_by_bits(View S, const char* words, int words_of_line, int line, int lines, int place) {
  constexpr int TILES = View::TILES % 4 == 0 ? 4 : View::TILES % 2 == 0 ? 2 : 1;  // tiles whose bits come in one load
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const bool exists = line + 8 * r < lines;
    const char* of_line = words + i64(line + 8 * r) * words_of_line * 4;
#pragma unroll
    for (int n = 0; n < View::TILES; n += TILES) {
      const int first = place + 8 * n, word = first / 32;
      const u32 bits = exists && word < words_of_line ? ld_global<u32>(of_line + 4 * word) >> first % 32 : 0;
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        if ((bits & 1u << (8 * (i / 2) + i % 2)) == 0) S.at(r, n + i / 2, i % 2) = NEG_INF;
      }
    }
  }
}
