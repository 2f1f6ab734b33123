// What the backward kernels of Hopper share (backward/fa3/kernel.cu, backward/fa3_pair/kernel.cu): which key blocks a thread
// block takes, and which query tiles these visit. How K, V, Q and dO come: backward_loader.cuh; what becomes of them:
// backward_gradients.cuh; how dQ is added up: backward_sums.cuh.
#pragma once
#include "primitives/bulk_copy.cuh"
#include "primitives/grid.cuh"
#include "primitives/opaque.cuh"
#include "primitives/register_budget.cuh"
#include "primitives/semaphore.cuh"
#include "backward/common/passes.cuh"
#include "backward/common/schedule.cuh"
#include "shared/phases.cuh"
#include "wgmma/pipeline.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;  // warpgroup 0 is the producer
constexpr int GROUP_KEYS = 64;                // rows of S^T in one warpgroup
constexpr bool PAIRED = CLUSTER == 2;         // two blocks, a cluster, share out the keys of a key block
constexpr int BLOCK_KEYS = Bc / CLUSTER;      // of them, those of one
constexpr int KEY_GROUPS = BLOCK_KEYS / GROUP_KEYS;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S and dP; TMA fills the last one up with zeros
constexpr int KEY_TILE_BYTES = wgmma_tile_bytes(GROUP_KEYS, HEAD_DIM);  // K or V of 64 keys
constexpr int QUERY_TILE_BYTES = wgmma_tile_bytes(Br, HEAD_DIM);        // Q or dO
constexpr int NUMBERS_BYTES = Br * 4;                                   // L or D
constexpr int DS_PART_BYTES = Br * ATOM_ROW_BYTES;                      // dS of 64 keys: a row per query
constexpr int ADDERS = 2;  // DETERMINISTIC and BULK_ADD: backward/fa3_common/sums.cuh
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int PRODUCER_REGISTERS = RUNS_ON ? 40 : 24, CONSUMER_REGISTERS = RUNS_ON ? 232 : 240;
static_assert(ALIGNMENT == 16, "TMA needs 16-byte aligned rows");
static_assert(CONSUMERS == 2, "registers are shared out for two");
static_assert(registers_suffice(PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS), "a consumer would wait for ever");
static_assert(BLOCK_KEYS % GROUP_KEYS == 0 && Br % 16 == 0, "tiles of wgmma");
static_assert(!PAIRED || !RUNS_ON, "a pair is launched for its one item");
static_assert(SKIP_MASKED_TILES, "blocks that see nothing of a tile do not add to it");
constexpr bool LOOKED_UP = is_looked_up(MASK_KIND), RAGGED = LENGTHS_KIND != DENSE;
static_assert(!LOOKED_UP || !DETERMINISTIC, "turns are known where tiles lie side by side");
static_assert(!LOOKED_UP || (!RAGGED && !ALIBI && !SINK), "bands have those");

// The key block that a thread block is busy with, and the query tiles that it visits: a record in shared memory, where it costs
// no registers. RUNS_ON blocks take one item after another, whose records the pass before has worked out
// (prepare_items), for a division takes long in the one thread that does it; else a block is launched for its one item.
constexpr int KEY_RECORDS = ITEM_FULL_BYTES / 8, RECORD_BYTES = 16 * RECORD_VECTORS;
static_assert(ITEMS_BYTES == KEY_RECORDS * RECORD_BYTES && ITEM_EMPTY_BYTES == ITEM_FULL_BYTES, "a record, two barriers");
static_assert(K_FULL_BYTES == 8 * K_STAGES && K_EMPTY_BYTES == K_FULL_BYTES, "a barrier a buffer of K");
static_assert(V_FULL_BYTES == 8 && V_EMPTY_BYTES == 8, "V has one");
static_assert(SEQUENCE_BYTES == 32 && TAIL_FULL_BYTES == 16, "RAGGED: two vectors, and a barrier of each loader");

// LOOKED_UP: the tiles that the block visits, the same for all heads of the group, are listed behind its record, and a
// QueryTile's q_tile is a place in that list.
struct KeyBlock {
  const BackwardParams& p;
  u32 record;

  DEVICE int word(int i) const { return int(ld_shared_u32(record + 4 * i)); }
  DEVICE WalkedTile listed(int place) const { return {word((LIST_OFFSET - ITEMS_OFFSET) / 4 + place)}; }
  DEVICE int of_sequence(int i) const { return word((SEQUENCE_OFFSET - ITEMS_OFFSET) / 4 + i); }
  DEVICE int k_block() const { return word(0); }
  DEVICE int kv_head() const { return word(1); }
  DEVICE int batch() const { return word(2); }
  DEVICE int count() const { return word(3); }  // of tiles, over all heads of the group
  DEVICE u32 index() const { return u32(word(8)); }
  DEVICE TileRange tiles() const {
    if constexpr (LOOKED_UP) {
      TileTally tally;
      for (int i = 0; i < word(5); ++i) tally.count(listed(i).tile(), listed(i).masked());
      return tally.range(word(9));
    }
    return {word(9), word(4), word(5), word(6), word(7)};
  }
  DEVICE int q_tile(QueryTile tile) const { return LOOKED_UP ? listed(tile.q_tile).tile() : tile.q_tile; }
  DEVICE u32 head() const { return u32(batch() * p.kv_heads + kv_head()); }  // of all
  DEVICE u32 group() const { return HeadGroups{p}.of_head(head()); }
  DEVICE int first_key() const { return PAIRED ? word(11) : k_block() * Bc; }  // of the thread block's own
  // Of the sequence, and where it lies in the arrays.
  DEVICE HeadMask mask() const {
    if constexpr (RAGGED) return {of_sequence(0), of_sequence(1), of_sequence(2), of_sequence(3)};
    return head_mask(p);
  }
  DEVICE int rows() const { return RAGGED ? of_sequence(0) : p.seqlen_q; }
  DEVICE int keys() const { return RAGGED ? of_sequence(1) : p.seqlen_k; }
  DEVICE int stored_keys() const { return RAGGED ? of_sequence(4) : p.seqlen_k; }
  DEVICE int row_in_arrays() const { return RAGGED ? of_sequence(5) : 0; }
  DEVICE int key_in_arrays() const { return RAGGED ? of_sequence(6) : 0; }
  DEVICE int batch_in_arrays() const { return LENGTHS_KIND == PACKED ? 0 : batch(); }
  DEVICE int group_size() const { return p.heads / p.kv_heads; }
  // What ALiBi asks of it.
  DEVICE auto sequence() const {
    if constexpr (RAGGED) {
      return RaggedSequence{batch(), rows(), keys(), 0, stored_keys(), row_in_arrays(), key_in_arrays()};
    } else {
      return DenseSequence<BackwardParams>{p, batch()};
    }
  }

  DEVICE QueryTile first() const { return {kv_head() * group_size(), word(4)}; }
  DEVICE QueryTile next(QueryTile tile) const { return tile.next({0, word(4), word(5), 0, 0}); }
  DEVICE QueryTile previous(QueryTile tile) const { return tile.previous({0, word(4), word(5), 0, 0}); }
  // Number of a tile in the workspace.
  DEVICE u32 place(QueryTile tile) const {
    return u32(word(10)) + u32(tile.head) * BackwardWorkspace::tiles(p) + u32(q_tile(tile));
  }
  DEVICE float* workspace(QueryTile tile) const { return BackwardWorkspace::tile(p, place(tile)); }
  DEVICE bool cuts(QueryTile tile) const {  // some score of the tile is hidden
    auto past_end = [&] { return keys() - first_key() < BLOCK_KEYS; };
    if constexpr (LOOKED_UP) return listed(tile.q_tile).masked() || past_end();
    return tile.q_tile < word(6) || tile.q_tile >= word(7) || past_end();
  }
};

// By a thread that asks for a key block's numbers of rows.
DEVICE void await_prepared(const KeyBlock& block) {
  if constexpr (!RUNS_ON) return;
  const BackwardWorkspace workspace(block.p);
  const u32 wanted = HeadGroups{block.p}.strips();
  const u32* const counter = workspace.counter(block.p, PREPARED, block.head());
  while (ld_acquire_gpu(counter) != wanted) {
  }
  global_proxy_fence();
}

// RUNS_ON: what stands in the workspace, where the pass before has written down where counters begin. Worked out instead, that would
// be kept over loops, in registers that neither the producer nor consumers have.
DEVICE u32* where_counters_begin(const BackwardParams& p) { return static_cast<u32*>(p.workspace) + opaque(1); }
DEVICE u32* counter(const BackwardParams& p, Counter which, u32 i) {
  return static_cast<u32*>(p.workspace) + ld_global<u32>(where_counters_begin(p)) + which * HeadGroups{p}.heads() + i;
}

// By a thread that has added to dQ for a key block of a group, or knows that its warp has. It waits for the last addition of the
// copy engine; others are released with the count.
DEVICE void tell_added(const BackwardParams& p, u32 group) {
  if constexpr (BULK_ADD) bulk_wait();
  red_release_gpu_add(counter(p, ADDED, group), 1);
}

// Barriers that both kernels have: of items, of K and V, which take turns with items that have tiles. There are two buffers of K
// where dQ of an item's last tile is computed when S of the next item's first one has been (LINKED).
struct ItemBarriers {
  u32 records, tails;
  Ring<KEY_RECORDS> turns;
  Ring<K_STAGES> keys;
  Ring<1> values;

  DEVICE explicit ItemBarriers(u32 start)
      : records(start + ITEMS_OFFSET), tails(start + TAIL_FULL_OFFSET),
        turns{start + ITEM_FULL_OFFSET, start + ITEM_EMPTY_OFFSET}, keys{start + K_FULL_OFFSET, start + K_EMPTY_OFFSET},
        values{start + V_FULL_OFFSET, start + V_EMPTY_OFFSET} {}

  DEVICE u32 record(u32 i) const { return records + turns.stage(i) * RECORD_BYTES; }
  DEVICE void init() const {
    // The warps of consumers, and who loads.
    if constexpr (RUNS_ON) turns.init(1, 4 * CONSUMERS + 2);
    keys.init(KEY_GROUPS + PAIRED, 4 * CONSUMERS);  // PAIRED: with the other block's columns of K
    values.init(KEY_GROUPS, 4 * CONSUMERS);
    if constexpr (RAGGED) {
      mbarrier_init(tails, 1);
      mbarrier_init(tails + 8, 1);
    }
  }
  // Whether there is an item `i` for this block; its record may be read then.
  DEVICE bool has(u32 i) const {
    if constexpr (!RUNS_ON) return i == 0;
    turns.wait_full(i);
    return int(ld_shared_u32(record(i))) != NO_MORE_ITEMS;
  }
  // By every warp that reads the record, once it needs it no more; and by threads that read it alone.
  DEVICE void release(u32 i, int lane) const {
    if constexpr (!RUNS_ON) return;
    async_proxy_fence();  // it has been read, where the copy engine writes next
    warp_sync();
    turns.release(i, lane);
  }
  DEVICE void release_alone(u32 i) const {
    if constexpr (!RUNS_ON) return;
    async_proxy_fence();
    turns.release(i, 0);
  }
};

struct ItemRecord {
  vec4 parts[RECORD_VECTORS], of_sequence[RAGGED ? 2 : 1];

  DEVICE ItemRecord(const BackwardParams& p, u32 i) {
    const KeyItem item = key_item<Bc>(p, i, 8 * HEAD_DIM);
    const auto sequence = sequence_of(p, item.batch);
    const HeadMask mask = head_mask(p, sequence);
    const TileRange tiles = visited_queries<Br, Bc>(mask, item.k_block);
    const u32 count = u32(p.heads / p.kv_heads) * u32(tiles.end - tiles.first);
    const u32 first_tile = LENGTHS_KIND == PACKED ? first_packed_block<Br>(int(sequence.first_row()), item.batch)
                                                  : u32(item.batch) * u32(p.heads) * BackwardWorkspace::tiles(p);
    parts[0] = {u32(item.k_block), u32(item.kv_head), u32(item.batch), count};
    parts[1] = {u32(tiles.first), u32(tiles.end), u32(tiles.clear_first), u32(tiles.clear_end)};
    const u32 first_key = PAIRED ? u32(item.k_block * Bc) + blockIdx.x % CLUSTER * BLOCK_KEYS : 0;
    parts[2] = {i, u32(tiles.total), first_tile, first_key};
    if constexpr (RAGGED) {
      of_sequence[0] = {u32(mask.rows), u32(mask.keys), u32(mask.first), u32(mask.last)};
      of_sequence[1] = {u32(sequence.stored_keys()), u32(sequence.first_row()), u32(sequence.first_key()), 0};
    }
  }

  // LOOKED_UP, by a warp: lists the tiles that are visited.
  DEVICE void list_tiles(const BackwardParams& p, u32 list) {
    const int k_block = int(parts[0].x), kv_head = int(parts[0].y), batch = int(parts[0].z);
    TileWalk<false> walk(0);
    u32 count = 0;
    for (;; ++count) {
      const WalkedTile tile = walk.next((p.seqlen_q - 1) / Br + 1, [&](int tile) {
        return class_of_query_tile<MASK_KIND>(p, k_block, batch, kv_head, tile);
      });
      if (!tile.exists()) break;
      if (lane_id() == 0) st_shared_u32(list + 4 * count, u32(tile.code));
    }
    parts[0].w = u32(p.heads / p.kv_heads) * count;
    parts[1] = {0, count, 0, 0};
  }
};

// By the pass before: the records of all items.
DEVICE void prepare_items(const BackwardParams& p) {
  if constexpr (!RUNS_ON) return;
  const BackwardWorkspace workspace(p);
  for (u32 i = blockIdx.x * PASS_THREADS + threadIdx.x; i < workspace.num_items(p); i += gridDim.x * PASS_THREADS) {
    const ItemRecord record(p, i);
#pragma unroll
    for (int x = 0; x < RECORD_VECTORS; ++x) st_global(workspace.items + i64(i) * RECORD_VECTORS + x, record.parts[x]);
  }
}

// By one thread, or LOOKED_UP by a warp, before a barrier of the block: the record of the one item that a block is launched for.
DEVICE void take_item(const BackwardParams& p, u32 start) {
  if constexpr (RUNS_ON) return;
  ItemRecord record(p, blockIdx.x / CLUSTER);
  if constexpr (LOOKED_UP) {
    grid_await_previous();  // which finds out what runs of rows make of tiles
    record.list_tiles(p, start + LIST_OFFSET);
    if (lane_id() != 0) return;
  }
  if constexpr (RAGGED) {
#pragma unroll
    for (int x = 0; x < 2; ++x) st_shared_vec4(start + SEQUENCE_OFFSET + 16 * x, record.of_sequence[x]);
  }
#pragma unroll
  for (int x = 0; x < RECORD_VECTORS; ++x) st_shared_vec4(ItemBarriers(start).record(0) + 16 * x, record.parts[x]);
}

// RUNS_ON: by one thread, the next item of this thread block.
DEVICE void take_item(const BackwardParams& p, const ItemBarriers& items, u32 i) {
  const u32 index = atomic_add(BackwardWorkspace(p).next, 1), full = items.turns.full_barrier(i);
  items.turns.wait_empty(i);
  if (index >= BackwardWorkspace::num_items(p)) {
    st_shared_u32(items.record(i), u32(NO_MORE_ITEMS));
    mbarrier_arrive(full);
    return;
  }
  mbarrier_arrive_expect_tx(full, RECORD_BYTES);
  bulk_load(items.record(i), BackwardWorkspace(p).items + i64(index) * RECORD_VECTORS, RECORD_BYTES, full);
}

// A tile of an item, as single threads of the producer visit them: visit_items() calls `visit` for all of a block's, in order.
struct TileVisit {
  KeyBlock block;
  QueryTile tile;
  u32 n;        // number of the tile, over all items
  u32 item;     // number of the item, of those with tiles
  bool first, last;  // of its item
};
// RUNS_ON: who TAKES the items asks for the next one before it visits one. There are three records: consumers may be at the item
// before; and where items are linked they keep the one before that until its last dQ has been added, for which this waits.
template <bool TAKES = false, typename Visit>
DEVICE void visit_items(const BackwardParams& p, u32 start, const Visit& visit) {
  u32 n = 0, with_tiles = 0;
  if constexpr (TAKES && RUNS_ON) take_item(p, ItemBarriers(opaque(start)), 0);
  for (u32 i = 0;; ++i) {
    const ItemBarriers items(opaque(start));
    if (!items.has(i)) return;
    if constexpr (TAKES && RUNS_ON) take_item(p, items, i + 1);
    const KeyBlock block{p, items.record(i)};
    const u32 count = u32(block.count());
    if (count > 0) {
      QueryTile tile = block.first();
#pragma unroll 1  // unrolled, it takes more registers than a producer has
      for (const u32 end = n + count; n < end; ++n) {
        visit(TileVisit{block, tile, n, with_tiles, n == end - count, n + 1 == end});
        tile = block.next(tile);
      }
      ++with_tiles;
    }
    items.release_alone(i);
  }
}
