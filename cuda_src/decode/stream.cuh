// Copies of keys and values to shared memory, by cp.async (decode/tma.cuh: by the copy engine). Each warp (or ROW_WARPS warps
// that share keys and split the query rows) has its own ring of NUM_STAGES stages: no warp waits for another warp's loads.
//
// Rows before the old length come from the cache, through the block table if PAGED. Later rows come from the new tokens, and are
// also stored to the cache. Entries of the block table are loaded one tile ahead of the copies that need them. Rows past the
// length or before a window are zero-filled, not read: that memory may hold NaN or belong to another sequence.
#pragma once
#include "decode/scales.cuh"
#include "shared/named_barriers.cuh"

// A barrier of one ring's threads.
DEVICE void ring_sync(int ring) {
  if constexpr (ROW_WARPS == 1) {
    warp_sync();
  } else {
    bar_sync(RING_BARRIER + ring, RING_THREADS);
  }
}

// Copies ALIGNMENT bytes within global memory.
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

// A ring's position in a span: the members that AsyncKeyStream and TmaKeyStream share.
struct KeyStream {
  int batch, kv_head;
  const i32* table;  // PAGED: the sequence's row of the block table
  Lengths length;
  KeyPlaces places;
  int key;           // number of the first key of the next tile to copy (KeyPlaces)
  int end;           // one past the number of the span's last key
  int thread;        // index in the ring
  bool store_new;    // APPEND: this block stores the new tokens that it reads
  u32 scales;        // KEY_SCALES: shared memory of the ring's scales

  DEVICE void start_span(const DecodeParams& p, const Span& span, int ring) {
    batch = span.batch;
    kv_head = span.kv_head;
    length = span.length;
    store_new = span.row_block == 0;
    key = span.first_tile * Bc + ring * RING_KEYS;
    // If the window begins after the ring's keys of the first tile, the ring begins one tile later.
    if (WINDOWED && MASK != MASK_SETS && key + RING_KEYS <= first_read(p, length.keys)) key += Bc;
    places.set(p, batch, length.keys);
    end = places.end(span.last_tile, length.keys);
    table = p.block_table + batch * p.table_stride;
  }

  // Tiles that this ring has yet to copy.
  DEVICE int remaining() const { return key < end ? (end - key - 1) / Bc + 1 : 0; }

  // One past the position of the last key.
  DEVICE int end_place() const { return MASK == MASK_SETS ? length.keys : end; }

  // KEY_SCALES: begins the copies of a stage's scales. This thread copies scales of row thread % RING_KEYS of the tile: the key
  // at `position` in the sequence, in slot `slot` of page (or sequence) `outer`.
  DEVICE void copy_scales(const DecodeParams& p, int stage, int position, int outer, int slot) const {
    const bool valid = position < end_place() && !places.some_hidden(p, position, 1, length.keys);
    const i64 at = key_scale_index(p, outer, kv_head, slot);
#pragma unroll
    for (int i = thread; i < 2 * RING_KEYS; i += RING_THREADS) {
      const float* scale = (i < RING_KEYS ? p.k_scale : p.v_scale) + at;
      copy_unit_async<4>(scales + stage * SCALES_BYTES + i * 4, reinterpret_cast<const char*>(scale), valid);
    }
  }

  DEVICE const char* new_row(const void* tensor, const Strides& stride, int position) const {
    return static_cast<const char*>(tensor) +
           KV_ITEM * (batch * stride.batch + kv_head * stride.head + (position - length.old_keys) * stride.seq);
  }
};

struct AsyncKeyStream : KeyStream {
  static constexpr int UNITS = KV_ROW_BYTES / ALIGNMENT;  // copies per row
  static constexpr int STEP = UNITS <= RING_THREADS ? RING_THREADS / UNITS : 1;  // rows that one pass copies
  static constexpr int PASSES = (RING_KEYS + STEP - 1) / STEP;

  const char* K;  // row 0 of this head, of the sequence or (PAGED) of page 0
  const char* V;
  i64 k_stride, v_stride;  // bytes, from row to row
  int page, in_page;       // PAGED: page and slot of row thread % RING_KEYS of the next tile

  DEVICE void init(u32, int ring_thread) { thread = ring_thread; }

  DEVICE void start(const DecodeParams& p, const Span& span, int ring) {
    const i64 first = PAGED ? 0 : span.batch;
    K = static_cast<const char*>(p.k_cache) + KV_ITEM * (first * p.k_stride.batch + span.kv_head * p.k_stride.head);
    V = static_cast<const char*>(p.v_cache) + KV_ITEM * (first * p.v_stride.batch + span.kv_head * p.v_stride.head);
    k_stride = p.k_stride.seq * KV_ITEM;
    v_stride = p.v_stride.seq * KV_ITEM;
    start_span(p, span, ring);
    if constexpr (PAGED) load_page(p);
  }

  // Goes back to key number `first_key`, to read the span again.
  DEVICE void restart(const DecodeParams& p, int first_key) {
    key = first_key;
    if constexpr (PAGED) load_page(p);
  }

  DEVICE void load_page(const DecodeParams& p) {
    const int mine = places.of(key) + thread % RING_KEYS;
    page = mine < end_place() ? int(ld_global<u32>(table + mine / p.page_size)) : 0;
    in_page = mine % p.page_size;
  }

  // The oldest tile has landed for all threads of the ring.
  DEVICE void await(const DecodeParams&, u32, int, int, int ring) {
    cp_async_wait<NUM_STAGES - 1>();
    ring_sync(ring);
  }

  // Before a stage is refilled. The ring's barrier that follows suffices for cp.async.
  DEVICE void release() {}

  // Begins the copies of the next tile. Commits a group even if no tile is left: await() counts groups.
  DEVICE void copy_next(const DecodeParams& p, u32 buffer, int stage) {
    if (key < end) {
      const int place = places.of(key);
      if constexpr (KEY_SCALES) {
        const int mine = place + thread % RING_KEYS;
        copy_scales(p, stage, mine, PAGED ? page_to_read(p, page) : batch, PAGED ? in_page : mine);
      }
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

  // Each thread copies one unit (ALIGNMENT bytes) of a row, then the same unit of later rows. All threads must reach the
  // shuffles: another lane may hold a row's page.
  template <bool NEW_ROWS>
  DEVICE void copy_tile(const DecodeParams& p, u32 buffer, int place) {
    constexpr int COLUMNS = (UNITS + RING_THREADS - 1) / RING_THREADS;  // above 1 only if ALIGNMENT is small
#pragma unroll 1
    for (int column = 0; column < COLUMNS; ++column) {
      const int first_row = COLUMNS == 1 ? thread / UNITS : 0;
      const int unit = COLUMNS == 1 ? thread % UNITS : column * RING_THREADS + thread;
      const bool in_row = COLUMNS == 1 ? RING_THREADS % UNITS == 0 || thread < STEP * UNITS : unit < UNITS;
      const char* k = K + (place + first_row) * k_stride + unit * ALIGNMENT;
      const char* v = V + (place + first_row) * v_stride + unit * ALIGNMENT;
      // Unrolled as far as registers hold the addresses: rows of 512 bytes leave few registers.
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

  // One unit of K and of V. `k` and `v`: its addresses in the cache; `writable`: store new tokens to them.
  template <bool NEW_ROWS>
  DEVICE void copy_unit(const DecodeParams& p, u32 target, int position, int offset, const char* k, const char* v,
                        bool writable) {
    const bool exists = position < end_place(), valid = exists && !places.some_hidden(p, position, 1, length.keys);
    if constexpr (NEW_ROWS) {
      if (exists && position >= length.old_keys) {
        const char* k_new = new_row(p.k_new, p.k_new_stride, position) + offset;
        const char* v_new = new_row(p.v_new, p.v_new_stride, position) + offset;
        if (writable) {
          if (is_of_k(offset)) move_unit(const_cast<char*>(k), k_new);
          if (is_of_v(offset)) move_unit(const_cast<char*>(v), v_new);
        }
        k = k_new;
        v = v_new;
      }
    }
    if (is_of_k(offset)) copy_unit_async<ALIGNMENT>(target, k, valid);
    if (is_of_v(offset)) copy_unit_async<ALIGNMENT>(target + KV_TILE_BYTES, v, valid);
  }
};
