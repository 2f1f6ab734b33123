// The producer if tiles are listed (tile_list.cuh): three warps. The first classifies tiles, one for each lane, and lists the
// tiles to visit, a few ahead. The second asks TMA for Q and K of listed tiles, the third for V. (A single warp would need more
// registers than a producer has.) With a tree of new tokens, a fourth writes what the tokens see. Each K tile has a descriptor,
// which the mbarriers of its K buffer guard.
#pragma once
#include "primitives/opaque.cuh"
#include "forward/fa3/producer.cuh"
#include "forward/fa3/tile_list.cuh"

// An entry of the list.
struct alignas(16) ListEntry {
  ListedTile tile;
  int row;       // row of the arrays where the tile begins
  int existing;  // keys of the sequence from there on
};
constexpr int END_OF_LIST = -1;  // in place of a tile

struct Lister {
  const AttentionParams& p;
  const SharedMemory& smem;
  RingCursor<LIST_STAGES> list = smem.list_ring();
  u32 round = 0;

  DEVICE void run(PersistentItems& items) {
    for (u32 index; items.take(p, index);) {
      items.Tr = opaque(items.Tr);  // else a product with Tr stays in a register over all items
      const WorkItem work = items.item(p, index);
      const auto sequence = sequence_of(p, work.batch);
      if (LENGTHS_KIND == PACKED && work.q_block * Br >= sequence.stored_rows()) continue;  // past the end of its sequence
      if (lane_id() == 0) {
        // Consumers read the descriptor after they have waited for the item's Q. It overwrites the descriptor of
        // ITEM_DESCRIPTORS items ago: loaders lag by no more items than the list has entries; for consumers, see Producer::run().
        write_shared(smem.item(round), Item{work, index});
        if constexpr (is_irregular(MASK_KIND)) {
          publish_irregular_mask(smem.item(round), p, work, sequence);
        } else {
          publish_sequence(smem.item(round), head_mask(p, sequence), sequence);
        }
      }
      warp_sync();  // all lanes read it
      list_item(smem.item(round++));
    }
    if (lane_id() == 0) {
      list.wait_empty();
      write_shared(smem.item(round), Item{{NO_MORE_ITEMS, 0, 0}, 0});
      write_shared(smem.entry(list.stage), ListEntry{{END_OF_LIST, 0}, 0, 0});
      mbarrier_arrive(list.full_barrier());
    }
  }

  // Consumers must know which tile is the last: an entry is published when the next tile, or the end, is known. Until then the
  // fields are in shared memory, in the unpublished entry, and take no registers.
  DEVICE void list_item(u32 descriptor) {
    TileList tiles{p, descriptor};
    ListedTile tile = tiles.next();
    if (!tile.exists()) tile = {SPLIT_KEYS ? tiles.hidden_tile() : 0, NO_TILE_AT_ALL};
    begin_entry({tile.tile, tile.marks | FIRST_TILE}, descriptor);
    for (bool more = true; more;) {
      tile = tiles.next();
      more = tile.exists();
      end_entry(!more);
      if (more) begin_entry(tile, descriptor);
    }
  }
  DEVICE void begin_entry(const ListedTile& tile, u32 descriptor) {
    if (lane_id() == 0) {
      list.wait_empty();
      write_shared(smem.entry(list.stage), entry(tile, descriptor));
    }
    if constexpr (CACHED) {
      warp_sync();  // the entry is empty
      if (lane_id() < BOXES) write_shared(smem.entry(list.stage) + 16 + 8 * lane_id(), box_of(tile, descriptor));
    }
  }
  DEVICE void end_entry(bool last) {
    if constexpr (CACHED) warp_sync();  // all lanes have written their box
    if (lane_id() == 0) {
      const u32 marks = smem.entry(list.stage) + OFFSET_OF(ListedTile, marks);
      if (last) st_shared_u32(marks, ld_shared_u32(marks) | LAST_TILE);
      mbarrier_arrive(list.full_barrier());
    }
    list.advance();
  }

  // An item without visible tiles gets a tile past the end of the arrays, where TMA reads zeros.
  DEVICE ListEntry entry(const ListedTile& tile, u32 descriptor) const {
    const int row = tile.tile * Bc;
    if constexpr (CACHED) return {tile, 0, tile.stands_for_none() ? Bc : read_mask(descriptor).keys - row};
    if (tile.stands_for_none()) return {tile, LENGTHS_KIND == PACKED ? p.total_k : p.seqlen_k, Bc};
    if constexpr (LENGTHS_KIND == DENSE) return {tile, row, p.seqlen_k - row};
    return {tile, first_key_of(descriptor) + row, read_mask(descriptor).keys - row};
  }

  // CACHED: the place of this lane's box. If no row of the item sees the box, its entry of the block table may hold any number:
  // the box is placed past the last page, where TMA reads zeros. An entry out of range reads zeros, too.
  DEVICE PlaceInCache box_of(const ListedTile& tile, u32 descriptor) const {
    const auto& cache = cache_of(p);
    const HeadMask mask = read_mask(descriptor);
    const int key = tile.tile * Bc + lane_id() * PAGE_BOX, first = mask.keys_begin(read_shared<Item>(descriptor).q_block * Br);
    if (tile.stands_for_none() || key >= mask.keys || key + PAGE_BOX <= first) return {cache.num_pages, 0};
    if constexpr (is_irregular(MASK_KIND)) return place_in_cache(cache, read_shared<Item>(descriptor).batch, key);
    return place_in_cache(cache, int(ld_shared_u32(descriptor + SEQUENCE_AT)), key);
  }
};

// Loads a tile of keys or values from a cache, by one thread. `boxes`: from the list entry.
DEVICE void load_boxes(u32 tile, u32 full_barrier, const TensorMap* map, u32 boxes, int head) {
  static_assert(!CACHED || HEAD_DIM == V_DIM, "keys and values in a cache have one head dim");
  mbarrier_arrive_expect_tx(full_barrier, K_TILE_BYTES);
  for (int i = 0; i < BOXES; ++i) {
    const auto box = read_shared<PlaceInCache>(boxes + 8 * i);
    for (int a = 0; a < atoms(HEAD_DIM); ++a) {
      tma_load_4d(tile + (a * Bc + i * PAGE_BOX) * ATOM_ROW_BYTES, map, full_barrier, a * ATOM_COLUMNS, box.slot, head, box.page);
    }
  }
}

// A loader's position in the list, and the current entry's item.
struct ListReader {
  const AttentionParams& p;
  const SharedMemory& smem;
  RingCursor<LIST_STAGES> list = smem.list_ring();
  u32 round = 0;
  int kv_head = 0, batch = 0;  // computed once per item: a division for each tile is too slow (NOTES.md)

  // False at the end of the list. The entry stays valid until done().
  DEVICE bool next(ListEntry& entry) {
    list.wait_full();
    entry = read_shared<ListEntry>(smem.entry(list.stage));
    if (entry.tile.tile == END_OF_LIST) return false;
    if (entry.tile.first()) {
      const Item item = read_shared<Item>(smem.item(round++));
      kv_head = item.head / (p.heads / p.kv_heads);
      batch = LENGTHS_KIND == PACKED ? 0 : item.batch;
    }
    return true;
  }
  DEVICE u32 descriptor() const { return smem.item(round - 1); }
  template <int COLUMNS>
  DEVICE void load(u32 tile, u32 full_barrier, const TensorMap* map, const ListEntry& entry) const {
    if constexpr (CACHED) {
      load_boxes(tile, full_barrier, map, smem.entry(list.stage) + 16, kv_head);
    } else {
      load_tile<Bc, COLUMNS>(tile, full_barrier, map, entry.row, kv_head, batch);
    }
  }
  DEVICE void done(int lane) {
    list.release(lane);
    list.advance();
  }
};

// Alg. 1, l. 3-10, for Q and K: one thread.
struct KeyLoader {
  const AttentionParams& p;
  const TensorMap *Q_map, *K_map;
  const SharedMemory& smem;
  ListReader reader{p, smem};
  RingCursor<NUM_STAGES> K_ring = smem.K_ring();
  QueryRing Q_ring{};
  PhaseLog inside = PhaseLog(p.trace, true);

  DEVICE void run() {
    for (ListEntry entry; reader.next(entry); reader.done(0)) {
      if (TRACE_INSIDE && entry.tile.first()) inside.item(read_shared<Item>(reader.descriptor()).index + gridDim.x * blockIdx.y);
      K_ring.wait_empty(inside, entry.tile.tile);
      write_shared(smem.tile(K_ring.stage), entry.tile);
      reader.load<HEAD_DIM>(smem.K + K_ring.stage * K_TILE_BYTES, K_ring.full_barrier(), K_map, entry);
      K_ring.advance();
      if (entry.tile.first()) load_item();
    }
    end_query_tiles(smem, Q_ring);
    inside.close();
  }

  DEVICE void load_item() {
    const Item item = read_shared<Item>(reader.descriptor());
    int row = item.q_block * Br;
    if constexpr (LENGTHS_KIND == PACKED && is_irregular(MASK_KIND)) {
      row += int(sequence_of(p, item.batch).first_row());
    } else if constexpr (LENGTHS_KIND != DENSE && !is_irregular(MASK_KIND)) {
      row += int(read_sequence(reader.descriptor()).first_row());
    }
    load_query_tiles(smem, Q_map, Q_ring, item, row, reader.batch);
  }
};

// Alg. 1, l. 3-10, for V: one warp. TMA copies whole tiles: after the last key of a sequence come keys of another sequence, or
// padding that may hold NaN. Their scores are masked, but 0 × NaN is NaN: V's rows past the end become zeros before consumers
// see the tile.
struct ValueLoader {
  const AttentionParams& p;
  const TensorMap* V_map;
  const SharedMemory& smem;
  const int lane;
  ListReader reader{p, smem};
  RingCursor<NUM_STAGES> V_ring = smem.V_ring();
  u32 tail_parity = 0;
  PhaseLog inside = PhaseLog(p.trace, lane == 0);

  DEVICE void run() {
    for (ListEntry entry; reader.next(entry); reader.done(lane)) {
      const u32 tile = smem.V + V_ring.stage * V_TILE_BYTES;
      const bool has_tail = LENGTHS_KIND != DENSE && entry.existing < Bc;
      if (CACHED ? elect_one() : lane == 0) {
        V_ring.wait_empty(inside, entry.tile.tile);
        reader.load<V_DIM>(tile, has_tail ? smem.tail_full : V_ring.full_barrier(), V_map, entry);
      }
      if (has_tail) {
        mbarrier_wait(smem.tail_full, tail_parity);
        tail_parity ^= 1;
        clear_rows<Bc, V_DIM>(tile, entry.existing, lane);
        async_proxy_fence();
      }
      warp_sync();  // all lanes have read the list, and written their zeros
      if (has_tail && lane == 0) mbarrier_arrive(V_ring.full_barrier());
      V_ring.advance();
    }
    inside.close();
  }
};

// TREE, by one warp: beside each K tile that may hold new tokens, writes what new tokens see of each other. The K buffer is full
// only when KeyLoader and TreeLoader have arrived.
struct TreeLoader {
  const AttentionParams& p;
  const SharedMemory& smem;
  ListReader reader{p, smem};
  RingCursor<NUM_STAGES> K_ring = smem.K_ring();

  DEVICE void run() {
    for (ListEntry entry; reader.next(entry); reader.done(lane_id())) {
      K_ring.wait_empty();
      if (entry.tile.block_masked()) write(read_sequence(reader.descriptor()).sequence_index);
      warp_sync();  // all lanes have read the list, and written their tokens
      if (lane_id() == 0) mbarrier_arrive(K_ring.full_barrier());
      K_ring.advance();
    }
  }
  DEVICE void write(int sequence) const {
    const CacheParams& cache = cache_of(p);
    const u32 rows = smem.tree(K_ring.stage);
    // Rows after the last packed sequence are not stored.
    const WarpTree<TREE, 64> tree(cache.tree, min(sequence, cache.batch - 1), cache.tree_tokens, lane_id());
    tree.of_lane(lane_id(), [&](int token, u64 seen) { write_shared(rows + 8 * token, seen); });
  }
};
