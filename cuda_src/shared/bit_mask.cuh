// Masks with one bit for each score: the device side of cufa/problem/bits.py. Bit n of a word is the n-th of 32 neighbours on a
// line: of 32 keys of a row, or, for kernels that keep a block of keys, of 32 rows of a key.
//
// Before the kernel, prepare_bits() finds for each tile whether some score and whether every score is visible: one bit each, for
// CLASS_ROWS rows and BLOCK_KV keys. Bit n of a word is the n-th of 32 tiles along the lines, so that a walk along them reads 32
// tiles at once. Every call does so: the bits are on the GPU and may change.
#pragma once
#include "shared/lengths.cuh"
#include "shared/fragment_view.cuh"

constexpr int CLASS_ROWS = BLOCK_Q % 64 == 0 ? 64 : BLOCK_Q;

// The classes of 32 tiles.
struct alignas(8) TileClasses {
  u32 some, every;  // a bit for each tile: some score is visible; all scores are, and all of them exist along the lines
};

// Bits and tile classes of all heads of the mask.
template <typename Params>
struct BitMask {
  static constexpr bool BY_KEY = LINES_ARE_KEYS<Params>;
  static constexpr int TILE_LINES = BY_KEY ? BLOCK_KV : CLASS_ROWS, TILE_PLACES = BY_KEY ? CLASS_ROWS : BLOCK_KV;

  char *words, *classes;
  int lines, words_of_line;
  int across, along;  // tiles down the lines; words of 32 tiles along them

  DEVICE explicit BitMask(const Params& p)
      : words(reinterpret_cast<char*>(const_cast<i32*>(p.mask.runs))),
        classes(static_cast<char*>(p.workspace) + p.mask.workspace), lines(BY_KEY ? p.seqlen_k : p.seqlen_q),
        words_of_line(p.mask.keys), across((lines - 1) / TILE_LINES + 1), along(words_along(BY_KEY ? p.seqlen_q : p.seqlen_k)) {}

  DEVICE static int words_along(int places) { return (places - 1) / TILE_PLACES / 32 + 1; }
  DEVICE i64 bytes_of_head() const { return i64(lines) * words_of_line * 4; }
  DEVICE i64 classes_of_head() const { return i64(across) * along; }
};

// Bits begin ... end-1 of word `word` of a line.
DEVICE u32 bits_between(int word, int begin, int end) {
  const int low = max(begin - 32 * word, 0), high = min(end - 32 * word, 32);
  return low >= high ? 0 : (0xffffffffu >> (32 - (high - low))) << low;
}

// Bit n of the result is `bit` of lane n.
DEVICE u32 bits_of_lanes(bool bit) {
  u32 bits = u32(bit) << lane_id();
#pragma unroll
  for (int half = 16; half > 0; half /= 2) bits |= shfl_xor(bits, half);
  return bits;
}

// Classifies the tiles, which `num_warps` warps share: 32 tiles at once, one for each lane of warp `warp`.
template <typename Params>
DEVICE void prepare_bits(const Params& p, int warp, int num_warps) {
  using Mask = BitMask<Params>;
  constexpr int WORDS = (Mask::TILE_PLACES + 31) / 32 + (Mask::TILE_PLACES % 32 != 0);  // that a tile may have bits in
  constexpr int AT_ONCE = Mask::TILE_LINES % 16 == 0 ? 16 : 1;  // lines whose loads are in flight together
  const Mask mask(p);
  const i64 of_head = mask.classes_of_head(), total = i64(p.mask.sequences) * p.mask.heads * of_head;
  for (i64 index = warp; index < total; index += num_warps) {
    const int place = int(index % of_head), first_line = place / mask.along * Mask::TILE_LINES;
    const int begin = (place % mask.along * 32 + lane_id()) * Mask::TILE_PLACES;
    const char* words = mask.words + index / of_head * mask.bytes_of_head();
    u32 seen = 0, hidden = 0;
    for (int line = 0; line < Mask::TILE_LINES; line += AT_ONCE) {
      u32 bits[AT_ONCE][WORDS];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const char* of_line = words + i64(min(first_line + line + n, mask.lines - 1)) * mask.words_of_line * 4;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) bits[n][w] = ld_global<u32>(of_line + 4 * min(begin / 32 + w, mask.words_of_line - 1));
      }
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const int word = begin / 32 + w;
        const u32 wanted = bits_between(word, begin, begin + Mask::TILE_PLACES);
        const u32 existing = word < mask.words_of_line ? wanted : 0;  // bits past the end are 0
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) seen |= bits[n][w] & existing, hidden |= wanted & ~(bits[n][w] & existing);
      }
    }
    const vec2 found = {bits_of_lanes(seen != 0), bits_of_lanes(hidden == 0)};
    if (lane_id() == 0) st_global(mask.classes + 8 * index, found);
  }
}

// The bits of a view of scores, in registers. `line` is the lane's first row of the view, `place` its first column; the sequence
// has `lines` lines of `places` places. The view begins at a multiple of its columns.
template <typename View>
struct ScoreBits {
  static constexpr int TILES = View::TILES % 4 == 0 ? 4 : View::TILES % 2 == 0 ? 2 : 1;  // tiles whose bits come in one load
  u32 bits[View::ROWS][View::TILES / TILES];

  DEVICE void load(const char* words, int words_of_line, int line, int lines, int place, [[maybe_unused]] int places) {
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) {
      const bool exists = line + 8 * r < lines;
      const char* of_line = words + i64(line + 8 * r) * words_of_line * 4;
#pragma unroll
      for (int n = 0; n < View::TILES; n += TILES) {
        const int first = place + 8 * n, word = first / 32;
        bits[r][n / TILES] = exists && word < words_of_line ? ld_global<u32>(of_line + 4 * word) >> first % 32 : 0;
        if constexpr (LENGTHS_KIND != DENSE) bits[r][n / TILES] &= bits_between(0, 0, places - first);
      }
    }
  }
  // Scores whose bit is 0 become -inf, as do scores past the end.
  DEVICE void hide(View S) const {
#pragma unroll
    for (int r = 0; r < View::ROWS; ++r) {
      S.for_each_in_row(r, [&](int column, float& s) {
        const u32 shift = column % (8 * TILES);
        if ((bits[r][column / (8 * TILES)] & 1u << shift) == 0) s = NEG_INF;
      });
    }
  }
};
template <typename View>
DEVICE void hide_by_bits(View S, const char* words, int words_of_line, int line, int lines, int place, int places) {
  ScoreBits<View> own;
  own.load(words, words_of_line, line, lines, place, places);
  own.hide(S);
}
