// The keys of one sequence that a decode kernel reads, and how its tiles are numbered. cufa/schedule/decode.py is the host's
// side. The kernel reads lengths from device memory: they may change between replays of a CUDA graph.
#pragma once
#include "decode/memory.cuh"
#include "decode/params.cuh"
#include "shared/lengths.cuh"
#include "shared/mask.cuh"
#include "shared/pages.cuh"

constexpr MaskKind MASK_KIND = MaskKind(MASK);
constexpr MaskKind BAND_KIND = MASK_KIND >= MASK_SETS ? MASK_BAND : MASK_KIND;
constexpr bool WINDOWED = BAND_KIND == MASK_BAND;
constexpr bool CHUNKED = MASK == MASK_COLUMNS;  // a token sees its own key and the keys before it in its chunk
constexpr bool UNEVEN = RAGGED || EXEMPT_BY_SEQUENCE;  // sequences may have different tiles
static_assert(MASK <= MASK_COLUMNS, "MASK_COLUMNS (chunks) is the last mask that decode kernels serve");
static_assert(!EXEMPT_BY_SEQUENCE || MASK == MASK_SETS, "EXEMPT_BY_SEQUENCE: only MASK_SETS has exempt tokens");
constexpr bool SEVERAL_TOKENS = MASK != MASK_FULL;  // MASK_FULL: one query token, which sees all keys

// Keys of one sequence before the call (old_keys) and after its new tokens are appended (keys). Both are clamped to the capacity
// of the cache, because cache_seqlens is not checked.
struct Lengths {
  int old_keys, keys;
};

DEVICE Lengths sequence_lengths(const DecodeParams& p, int batch) {
  const int old_keys = within(RAGGED ? int(ld_global<u32>(p.cache_seqlens + batch)) : p.capacity, p.capacity);
  return {old_keys, APPEND || QUANTIZE_NEW ? min(old_keys + p.new_tokens, p.capacity) : old_keys};
}

// The band mask of a sequence of `keys` keys. A query token is named by the position of its own key. It sees its own key and the
// `left` keys before it.
DEVICE Band<BAND_KIND> band_of(const DecodeParams& p, int keys) { return {keys, keys, -p.left, 0}; }

// The first key that any query token sees: the left edge of the first token's window (CHUNKED: the start of its chunk).
DEVICE int first_visible(const DecodeParams& p, int keys) {
  if constexpr (CHUNKED) {
    const int token = max(keys - p.tokens, 0);
    return token - token % p.chunk;
  }
  return band_of(p, keys).keys_begin(keys - p.tokens);
}

// EXEMPT_BY_SEQUENCE: the exempt tokens of one sequence.
struct Exempt {
  int keep, prefix, global_tokens;

  DEVICE Exempt(const DecodeParams& p, int batch)
      : keep(of_sequence(p.keep_of, p.keep, batch)),
        prefix(of_sequence(p.prefix_of, p.prefix, batch)),
        global_tokens(of_sequence(p.global_of, p.global_tokens, batch)) {}

  // Keys before this one are visible to the token at `place`, even outside the band.
  DEVICE int end(int place, int keys) const {
    return global_tokens > 0 && place < global_tokens ? keys : max(min(keep, place + 1), min(prefix, keys));
  }

 private:
  static DEVICE int of_sequence(const i32* numbers, int number, int batch) {
    return numbers == nullptr ? number : ld_global<i32>(numbers + batch * number);
  }
};

// MASK_SETS: the number of first keys of a sequence that are read even if the window begins later. If a query token is one of the
// global tokens, the window begins before this key: all keys are read.
DEVICE int kept_keys(const DecodeParams& p, int batch) {
  if constexpr (!EXEMPT_BY_SEQUENCE) return p.keep;
  const Exempt exempt(p, batch);
  return within(max(max(exempt.keep, exempt.prefix), exempt.global_tokens), p.capacity);
}

// The first key that is read. Appended tokens before the window are read too: the kernel that reads them also stores them.
DEVICE int first_read(const DecodeParams& p, int keys) {
  if constexpr (!WINDOWED) return 0;
  const int first = first_visible(p, keys);
  return APPEND || QUANTIZE_NEW ? min(first, max(keys - p.new_tokens, 0)) : first;
}

// The tiles of a sequence that are read. A sequence without keys still has one tile: its output, zeros, must be written.
// MASK_SETS: tiles between the kept keys and the window get no number, so that the tiles that are read have consecutive numbers.
struct Tiles {
  int first, count;
};

// MASK_SETS: the number of tiles with kept keys before the window's first tile.
DEVICE int kept_tiles(const DecodeParams& p, int batch, int keys) {
  return MASK == MASK_SETS ? min((kept_keys(p, batch) + Bc - 1) / Bc, first_read(p, keys) / Bc) : 0;
}

DEVICE Tiles tiles_to_read(const DecodeParams& p, int batch, int keys) {
  const int all = max(1, (keys + Bc - 1) / Bc), first = first_read(p, keys) / Bc;
  if constexpr (MASK == MASK_SETS) return {0, all - (first - kept_tiles(p, batch, keys))};
  return {first, all - first};
}

// From a key's number, tile * Bc + offset in the tile, to its position in the sequence: different for MASK_SETS only.
struct KeyPlaces {
  int gap_start, gap;  // MASK_SETS: position of the first key without a number, and how many such keys there are
  int kept;            // EXEMPT_BY_SEQUENCE: kept_keys()
  int visible;         // CHUNKED: first_visible()

  DEVICE void set(const DecodeParams& p, int batch, int keys) {
    if constexpr (EXEMPT_BY_SEQUENCE) kept = kept_keys(p, batch);
    if constexpr (CHUNKED) visible = first_visible(p, keys);
    if constexpr (MASK == MASK_SETS) {
      gap_start = kept_tiles(p, batch, keys) * Bc;
      gap = first_read(p, keys) / Bc * Bc - gap_start;
    }
  }
  DEVICE int of(int key) const {
    if constexpr (MASK == MASK_SETS) return key < gap_start ? key : key + gap;
    return key;
  }
  // Whether some key of place ... place + count - 1 is hidden from every query token: before all windows (CHUNKED: chunks), and
  // not kept (MASK_SETS).
  DEVICE bool some_hidden(const DecodeParams& p, int place, int count, int keys) const {
    return WINDOWED && place < (CHUNKED ? visible : first_visible(p, keys)) &&
           (MASK != MASK_SETS || place + count > (EXEMPT_BY_SEQUENCE ? kept : p.keep));
  }
  // One past the number of the last key in the tiles before `last_tile`.
  DEVICE int end(int last_tile, int keys) const {
    if constexpr (MASK == MASK_SETS) keys -= gap;
    return min(last_tile * Bc, keys);
  }
};
