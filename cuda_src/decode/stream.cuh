// Keys and values on their way into shared memory: every warp (or ROW_WARPS of them, that share keys and differ in query
// rows) has a ring of NUM_STAGES buffers of its own, so that no warp ever waits for another's loads. Here by cp.async;
// decode_tma.cuh has Hopper's copy engine do it.
//
// The row of a position comes from the cache, through the block table when there is one, or, from the old length on,
// from the new tokens, which are stored to the cache on the way. Entries of the block table are loaded one tile ahead of
// the copies that need them. Rows past the length, and those before a window, are filled with zeros and nothing is read:
// memory there may hold NaN, and pages that no token sees may have been given to another sequence.
#pragma once
#include "decode/memory.cuh"
#include "decode/schedule.cuh"
#include "shared/named_barriers.cuh"

// Threads of one ring wait for each other.
DEVICE void ring_sync(int ring) {
  if constexpr (ROW_WARPS == 1) {
    warp_sync();
  } else {
    bar_sync(RING_BARRIER + ring, RING_THREADS);
  }
}

// 16 bytes (or ALIGNMENT) from one place in global memory to another.
DEVICE void move_unit(char* to, const char* from) {
  if constexpr (ALIGNMENT == 16) {
    st_global(to, ld_global<vec4>(from));
  } else if constexpr (ALIGNMENT == 8) {
    st_global(to, ld_global<vec2>(from));
  } else if constexpr (ALIGNMENT == 4) {
    st_global(to, ld_global<u32>(from));
  } else {
    st_global(to, ld_global<u16>(from));
  }
}

// First key of a ring's first tile. A window may begin after the ring's keys of the tile that it begins in.
DEVICE int first_ring_key(const DecodeParams& p, const Piece& piece, int ring) {
  const int key = piece.first_tile * Bc + ring * RING_KEYS;
  return MASK == MASK_BAND && key + RING_KEYS <= first_read(p, piece.length.keys) ? key + Bc : key;
}

struct AsyncKeyStream {
  static constexpr int UNITS = KV_ROW_BYTES / ALIGNMENT;  // copies per row
  static constexpr int STEP = UNITS <= RING_THREADS ? RING_THREADS / UNITS : 1;  // rows at a time
  static constexpr int PASSES = (RING_KEYS + STEP - 1) / STEP;

  const char* K;  // of this head: row 0 of the sequence, or of page 0
  const char* V;
  const i32* table;
  Lengths length;
  i64 k_stride, v_stride;  // bytes from row to row
  KeyPlaces places;
  int key;                 // first of the next tile
  int end;                 // no tile starts here or after
  int page, in_page;       // of row lane % RING_KEYS of the next tile, loaded ahead
  int thread;              // of the ring
  int sequence, kv_head;   // for rows of k_new and v_new
  bool store_new;          // this block stores the new tokens that it reads (APPEND)

  DEVICE void init(u32, int ring_thread) { thread = ring_thread; }

  DEVICE void start(const DecodeParams& p, const Piece& piece, int ring) {
    const i64 batch = PAGED ? 0 : piece.batch;
    K = static_cast<const char*>(p.k_cache) + KV_ITEM * (batch * p.k_stride.batch + piece.kv_head * p.k_stride.head);
    V = static_cast<const char*>(p.v_cache) + KV_ITEM * (batch * p.v_stride.batch + piece.kv_head * p.v_stride.head);
    k_stride = p.k_stride.seq * KV_ITEM;
    v_stride = p.v_stride.seq * KV_ITEM;
    length = piece.length;
    if constexpr (APPEND) {
      sequence = piece.batch;
      kv_head = piece.kv_head;
      store_new = piece.row_block == 0;
    }
    key = first_ring_key(p, piece, ring);
    places.set(p, length.keys);
    end = places.end(piece.last_tile, length.keys);
    if constexpr (PAGED) {
      table = p.block_table + piece.batch * p.table_stride;
      load_page(p);
    }
  }

  // Tiles that this ring still has to copy.
  DEVICE int remaining() const { return key < end ? (end - key - 1) / Bc + 1 : 0; }

  // No key of a tile that is read lies there or after.
  DEVICE int end_place() const { return MASK == MASK_SETS ? length.keys : end; }

  DEVICE void load_page(const DecodeParams& p) {
    const int mine = places.of(key) + thread % RING_KEYS;
    page = mine < end_place() ? int(ld_global<u32>(table + mine / p.page_size)) : 0;
    in_page = mine % p.page_size;
  }

  // The oldest tile is there for all threads of the ring.
  DEVICE void await(const DecodeParams&, u32, int, int, int ring) {
    cp_async_wait<NUM_STAGES - 1>();
    ring_sync(ring);
  }

  // This thread has read a buffer; once all of the ring have met, it may be filled again.
  DEVICE void release() {}

  // The next tile on its way to a buffer; one group of copies whether there is a tile left or not.
  DEVICE void copy_next(const DecodeParams& p, u32 buffer, int) {
    if (key < end) {
      const int place = places.of(key);
      if (APPEND && place + RING_KEYS > length.old_keys) {
        copy_tile<true>(p, buffer, place);
      } else {
        copy_tile<false>(p, buffer, place);
      }
      key += Bc;
      if constexpr (PAGED) load_page(p);
    }
    cp_async_commit();
  }

  // Every thread keeps its column and steps down the rows; all take part, because a row's page is in another lane.
  template <bool NEW_ROWS>
  DEVICE void copy_tile(const DecodeParams& p, u32 buffer, int place) {
    constexpr int COLUMNS = (UNITS + RING_THREADS - 1) / RING_THREADS;  // more than 1 for narrow units only
#pragma unroll 1
    for (int column = 0; column < COLUMNS; ++column) {
      const int first_row = COLUMNS == 1 ? thread / UNITS : 0;
      const int unit = COLUMNS == 1 ? thread % UNITS : column * RING_THREADS + thread;
      const bool in_row = COLUMNS == 1 ? RING_THREADS % UNITS == 0 || thread < STEP * UNITS : unit < UNITS;
      const char* k = K + (place + first_row) * k_stride + unit * ALIGNMENT;
      const char* v = V + (place + first_row) * v_stride + unit * ALIGNMENT;
      // Unrolled as far as the addresses of copies fit in registers: rows of 512 bytes leave few.
#pragma unroll(ALIGNMENT == 16 ? (PASSES <= 8 && KV_ROW_BYTES < 512 ? PASSES : 2) : 1)
      for (int i = 0; i < PASSES; ++i) {
        const int row = first_row + i * STEP;
        const bool mine = in_row && (RING_KEYS % STEP == 0 || row < RING_KEYS);
        bool writable = APPEND && store_new;
        if constexpr (PAGED) {
          const int entry = int(shfl(u32(page), row % RING_KEYS));
          const i64 row_page = page_to_read(p, entry);
          if constexpr (APPEND) writable = store_new && !page_is_wild(p, entry);
          const int row_in_page = int(shfl(u32(in_page), row % RING_KEYS));
          k = K + row_page * p.k_stride.batch * KV_ITEM + row_in_page * k_stride + unit * ALIGNMENT;
          v = V + row_page * p.v_stride.batch * KV_ITEM + row_in_page * v_stride + unit * ALIGNMENT;
        }
        if (mine) {
          copy_unit<NEW_ROWS>(p, buffer + row * KV_PITCH + unit * ALIGNMENT, place + row, unit * ALIGNMENT, k, v, writable);
        }
        k += STEP * k_stride;
        v += STEP * v_stride;
      }
    }
  }

  // One unit of K and of V, at `k` and `v` in the cache, where new tokens are stored if it is `writable`.
  template <bool NEW_ROWS>
  DEVICE void copy_unit(const DecodeParams& p, u32 target, int position, int offset, const char* k, const char* v,
                        bool writable) {
    const bool exists = position < end_place(), valid = exists && !some_unseen(p, position, 1, length.keys);
    if constexpr (NEW_ROWS) {
      if (exists && position >= length.old_keys) {
        const char* k_new = new_row(p.k_new, p.k_new_stride, position) + offset;
        const char* v_new = new_row(p.v_new, p.v_new_stride, position) + offset;
        if (writable) {
          move_unit(const_cast<char*>(k), k_new);
          move_unit(const_cast<char*>(v), v_new);
        }
        k = k_new;
        v = v_new;
      }
    }
    copy_unit_async<ALIGNMENT>(target, k, valid);
    copy_unit_async<ALIGNMENT>(target + KV_TILE_BYTES, v, valid);
  }

  DEVICE const char* new_row(const void* tensor, const Strides& stride, int position) const {
    return static_cast<const char*>(tensor) +
           KV_ITEM * (sequence * stride.batch + kv_head * stride.head + (position - length.old_keys) * stride.seq);
  }
};
