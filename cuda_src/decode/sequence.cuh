// The keys of one sequence that a decode kernel reads, and how its tiles are numbered. cufa/schedule/decode.py is the host's
// side. The kernel reads lengths from device memory: they may change between replays of a CUDA graph.
#pragma once
#include "decode/memory.cuh"
#include "decode/params.cuh"
#include "shared/lengths.cuh"
#include "shared/mask.cuh"
#include "shared/pages.cuh"

constexpr MaskKind MASK_KIND = MaskKind(MASK);
constexpr MaskKind BAND_KIND = MASK == MASK_SETS ? MASK_BAND : MASK_KIND;
constexpr bool WINDOWED = BAND_KIND == MASK_BAND;
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

// The first key that any query token sees: the left edge of the first token's window.
DEVICE int first_visible(const DecodeParams& p, int keys) { return band_of(p, keys).keys_begin(keys - p.tokens); }

// Whether some key of place ... place + count - 1 is hidden from every query token: before all windows, and not kept (MASK_SETS).
DEVICE bool some_hidden(const DecodeParams& p, int place, int count, int keys) {
  return WINDOWED && place < first_visible(p, keys) && (MASK == MASK_BAND || place + count > p.keep);
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
DEVICE int kept_tiles(const DecodeParams& p, int keys) {
  return MASK == MASK_SETS ? min((p.keep + Bc - 1) / Bc, first_read(p, keys) / Bc) : 0;
}

DEVICE Tiles tiles_to_read(const DecodeParams& p, int keys) {
  const int all = max(1, (keys + Bc - 1) / Bc), first = first_read(p, keys) / Bc;
  if constexpr (MASK == MASK_SETS) return {0, all - (first - kept_tiles(p, keys))};
  return {first, all - first};
}

// From a key's number, tile * Bc + offset in the tile, to its position in the sequence: different for MASK_SETS only.
struct KeyPlaces {
  int gap_start, gap;  // MASK_SETS: position of the first key without a number, and how many such keys there are

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
  // One past the number of the last key in the tiles before `last_tile`.
  DEVICE int end(int last_tile, int keys) const {
    if constexpr (MASK == MASK_SETS) keys -= gap;
    return min(last_tile * Bc, keys);
  }
};
