// The keys of one sequence that a decode kernel reads, and how its tiles are numbered: the device side of
// cufa/schedule/decode.py. Lengths are read on the device, so that they may change between replays of a CUDA graph.
#pragma once
#include "decode/memory.cuh"
#include "decode/params.cuh"
#include "shared/lengths.cuh"
#include "shared/mask.cuh"
#include "shared/pages.cuh"

constexpr MaskKind MASK_KIND = MaskKind(MASK);
constexpr MaskKind BAND_KIND = MASK == MASK_SETS ? MASK_BAND : MASK_KIND;
constexpr bool WINDOWED = BAND_KIND == MASK_BAND;
constexpr bool SEVERAL_TOKENS = MASK != MASK_FULL;  // else a sequence has one query token, which sees all keys

// Keys of one sequence: those in the cache before the call, and those after its new tokens are appended. Both are clamped to the
// capacity of the cache, whatever cache_seqlens holds.
struct Lengths {
  int old_keys, keys;
};

DEVICE Lengths sequence_lengths(const DecodeParams& p, int batch) {
  const int old_keys = within(RAGGED ? int(ld_global<u32>(p.cache_seqlens + batch)) : p.capacity, p.capacity);
  return {old_keys, APPEND || QUANTIZE_NEW ? min(old_keys + p.new_tokens, p.capacity) : old_keys};
}

// The band mask of a sequence of `keys` keys. Query tokens are numbered by their place among the keys: a token sees its own key
// and the `left` keys before it.
DEVICE Band<BAND_KIND> band_of(const DecodeParams& p, int keys) { return {keys, keys, -p.left, 0}; }

// The first key that any query token sees: the left edge of the first token's window.
DEVICE int first_visible(const DecodeParams& p, int keys) { return band_of(p, keys).keys_begin(keys - p.tokens); }

// Whether the window hides some of the `count` keys from `place` on from all query tokens.
DEVICE bool some_hidden(const DecodeParams& p, int place, int count, int keys) {
  return WINDOWED && place < first_visible(p, keys) && (MASK == MASK_BAND || place + count > p.keep);
}

// The first key that is read. With APPEND, new tokens before the window are read too, because they must be stored.
DEVICE int first_read(const DecodeParams& p, int keys) {
  if constexpr (!WINDOWED) return 0;
  const int first = first_visible(p, keys);
  return APPEND || QUANTIZE_NEW ? min(first, max(keys - p.new_tokens, 0)) : first;
}

// The tiles of a sequence that are read, numbered from its first key on. A sequence without keys still has one tile: its zeros
// must be written. MASK_SETS: the tiles between the kept keys and the window are not counted.
struct Tiles {
  int first, count;
};

// MASK_SETS: tiles of kept keys before the window's first tile.
DEVICE int kept_tiles(const DecodeParams& p, int keys) {
  return MASK == MASK_SETS ? min((p.keep + Bc - 1) / Bc, first_read(p, keys) / Bc) : 0;
}

DEVICE Tiles tiles_to_read(const DecodeParams& p, int keys) {
  const int all = max(1, (keys + Bc - 1) / Bc), first = first_read(p, keys) / Bc;
  if constexpr (MASK == MASK_SETS) return {0, all - (first - kept_tiles(p, keys))};
  return {first, all - first};
}

// The place in the sequence of a key of a numbered tile.
struct KeyPlaces {
  int gap_start, gap;  // MASK_SETS: the keys without a number

  DEVICE void set(const DecodeParams& p, int keys) {
    if constexpr (MASK == MASK_SETS) {
      gap_start = kept_tiles(p, keys) * Bc;
      gap = first_read(p, keys) / Bc * Bc - gap_start;
    }
  }
  DEVICE int of(int key) const {
    if constexpr (MASK == MASK_SETS) return key < gap_start ? key : key + gap;
    return key;
  }
  // The number of the key after the last key of the tiles before `last_tile`.
  DEVICE int end(int last_tile, int keys) const {
    if constexpr (MASK == MASK_SETS) keys -= gap;
    return min(last_tile * Bc, keys);
  }
};
