// The ring of decode/stream.cuh, filled by the copy engine (sm_90). One lane requests boxes: 128 bytes of each of 16 keys. One
// mbarrier per stage counts the bytes.
//
// Entries of the block table are loaded 32 to 64 tiles ahead, one tile per lane: such a load waits in the same queue as the loads
// of the cache.
//
// A box always has 16 keys. Rows past the length or before a window may hold NaN: once landed, they are overwritten with zeros.
// Rows of new tokens are overwritten from k_new and v_new: another row block may be storing them while the box is read.
#pragma once
#include "primitives/mbarrier.cuh"
#include "primitives/tma.cuh"
#include "decode/stream.cuh"

struct TmaKeyStream : KeyStream {
  int index;              // lane of `pages` that holds the next tile's page
  int pages, next_pages;  // in lane i: page of the ring's tile i, and of tile i + 32
  u32 barriers;
  u32 phases = 0;         // bit i: the mbarrier phase of stage i

  // Called once. A barrier of the block must follow before any other warp waits on the mbarriers.
  DEVICE void init(u32 barriers_, int ring_thread) {
    barriers = barriers_;
    thread = ring_thread;
    if (thread == 0) {
      for (int stage = 0; stage < NUM_STAGES; ++stage) mbarrier_init(barriers + stage * 8, 1);
      mbarrier_init_fence();
    }
  }

  DEVICE void start(const DecodeParams& p, const Span& span, int ring) {
    start_span(p, span, ring);
    restart(p, key);
  }

  // Goes to key number `first_key`.
  DEVICE void restart(const DecodeParams& p, int first_key) {
    key = first_key;
    if constexpr (PAGED) {
      index = 0;
      pages = page_of(p, places.of(key + thread % 32 * Bc));
      next_pages = page_of(p, places.of(key + (thread % 32 + 32) * Bc));
    }
  }

  // The page that holds a position. Entries of the block table past the length are not read: page 0.
  DEVICE int page_of(const DecodeParams& p, int position) const {
    return position < end_place() ? int(ld_global<u32>(table + position / p.page_size)) : 0;
  }

  DEVICE void copy_next(const DecodeParams& p, u32 buffer, int stage) {
    if (key >= end) {
      if constexpr (KEY_SCALES) cp_async_commit();
      return;
    }
    int row = places.of(key), page = batch;
    if constexpr (PAGED) {
      row %= p.page_size;
      page = page_to_read(p, int(shfl(u32(pages), index)));
    }
    if (thread == 0) {
      const u32 barrier = barriers + stage * 8;
      mbarrier_arrive_expect_tx(barrier, 16 * CHUNK_BYTES * (chunks(K_ROW_BYTES) + chunks(V_ROW_BYTES)));
      copy_group<chunks(K_ROW_BYTES)>(&p.k_map, buffer, barrier, row, page);
      copy_group<chunks(V_ROW_BYTES)>(&p.v_map, buffer + KV_TILE_BYTES, barrier, row, page);
    }
    if constexpr (KEY_SCALES) {
      copy_scales(p, stage, places.of(key) + thread % RING_KEYS, page, row + thread % RING_KEYS);
      cp_async_commit();
    }
    key += Bc;
    if (PAGED && ++index == 32) {
      index = 0;
      pages = next_pages;
      next_pages = page_of(p, places.of(key + (thread % 32 + 32) * Bc));
    }
  }

  template <int CHUNKS>
  DEVICE void copy_group(const TensorMap* map, u32 target, u32 barrier, int row, int row_page) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      tma_load_4d(target + i * 16 * CHUNK_BYTES, map, barrier, i * (CHUNK_BYTES / KV_ITEM), row, kv_head, row_page);
    }
  }

  // Waits until the tile whose first key is at position `first_key` has landed for all threads of the ring.
  DEVICE void await(const DecodeParams& p, u32 buffer, int stage, int first_key, int ring) {
    mbarrier_wait(barriers + stage * 8, phases >> stage & 1);
    phases ^= 1u << stage;
    if constexpr (KEY_SCALES) {
      cp_async_wait<NUM_STAGES - 1>();
      ring_sync(ring);  // the scales have landed for all threads of the ring
    }
    const bool hidden = places.some_hidden(p, first_key, RING_KEYS, length.keys);
    if (first_key + RING_KEYS > (APPEND ? min(length.old_keys, end_place()) : end_place()) || hidden) {
      finish_tile(p, buffer, first_key);
      ring_sync(ring);  // zeros and new tokens are visible to all threads of the ring
    }
  }

  // Orders this thread's reads and stores (generic proxy) before the copies that overwrite the stage (async proxy).
  DEVICE void release() { async_proxy_fence(); }

  // Overwrites rows past the end or before the window with zeros, and rows of new tokens from k_new and v_new, which it also
  // stores to the cache.
  DEVICE void finish_tile(const DecodeParams& p, u32 buffer, int first_key) {
    constexpr int UNITS = KV_ROW_BYTES / 16;
#pragma unroll 1
    for (int i = thread; i < RING_KEYS * UNITS; i += RING_THREADS) {
      const int row = i / UNITS, unit = i - row * UNITS, position = first_key + row;
      const u32 target = tile_address(buffer, row, unit);
      if (position >= end_place()) {
        st_shared_vec4(target, vec4{0, 0, 0, 0});  // no box may have been requested for these rows
        st_shared_vec4(target + KV_TILE_BYTES, vec4{0, 0, 0, 0});
      } else if (APPEND && position >= length.old_keys) {
        const bool of_k = is_of_k(unit * 16), of_v = is_of_v(unit * 16);
        vec4 k{}, v{};
        if (of_k) k = ld_global<vec4>(new_row(p.k_new, p.k_new_stride, position) + unit * 16);
        if (of_v) v = ld_global<vec4>(new_row(p.v_new, p.v_new_stride, position) + unit * 16);
        const bool hidden = places.some_hidden(p, position, 1, length.keys);
        st_shared_vec4(target, hidden ? vec4{0, 0, 0, 0} : k);
        st_shared_vec4(target + KV_TILE_BYTES, hidden ? vec4{0, 0, 0, 0} : v);
        if (store_new) {
          int row_page = batch, row_in_page = position;
          if constexpr (PAGED) {
            row_page = page_of(p, position);
            row_in_page = position % p.page_size;
            if (page_is_wild(p, row_page)) continue;
          }
          if (of_k) st_global(cache_row(p.k_cache, p.k_stride, row_page, row_in_page) + unit * 16, k);
          if (of_v) st_global(cache_row(p.v_cache, p.v_stride, row_page, row_in_page) + unit * 16, v);
        }
      } else if (places.some_hidden(p, position, 1, length.keys)) {
        st_shared_vec4(target, vec4{0, 0, 0, 0});
        st_shared_vec4(target + KV_TILE_BYTES, vec4{0, 0, 0, 0});
      }
    }
  }

  DEVICE char* cache_row(void* tensor, const Strides& stride, int row_page, int row_in_page) const {
    return static_cast<char*>(tensor) +
           KV_ITEM * (row_page * stride.batch + kv_head * stride.head + row_in_page * stride.seq);
  }
};
