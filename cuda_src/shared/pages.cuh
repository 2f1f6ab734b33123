// Where a key of a cache in pages lies.
#pragma once
#include "primitives/primitives.cuh"

struct PlaceInCache {
  int page, slot;  // page: an entry of the block table, possibly out of range
};

// Without a block table the cache is contiguous: page b is sequence b.
template <typename Params>
DEVICE PlaceInCache place_in_cache(const Params& p, int sequence, int key) {
  if (p.block_table == nullptr) return {sequence, key};
  return {ld_global<i32>(p.block_table + sequence * p.table_stride + key / p.page_size), key % p.page_size};
}

// An entry of the block table may be out of range (wild), as for a padding sequence without pages. Reads through it are masked,
// but must stay within the cache; nothing is stored through it.
template <typename Params>
DEVICE int page_to_read(const Params& p, int entry) { return min(max(entry, 0), p.num_pages - 1); }
template <typename Params>
DEVICE bool page_is_wild(const Params& p, int entry) { return u32(entry) >= u32(p.num_pages); }
