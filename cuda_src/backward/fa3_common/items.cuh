// The work items of a thread block of Hopper's backward kernels, and the walk over their query tiles. A persistent block takes
// one item after another; the prepare pass has made their descriptors, whose divisions would take a single thread long. Any other
// block is launched for one item.
#pragma once
#include "backward/fa3_common/block.cuh"
#include "backward/fa3_common/ring.cuh"
#include "primitives/bulk_copy.cuh"
#include "primitives/grid.cuh"
#include "primitives/semaphore.cuh"
#include "wgmma/pipeline.cuh"

// The mbarriers of items, and of K and V. A ring of K or V advances with each item that has tiles. K has two buffers where items
// overlap: S of the next item's first tile is computed before dQ of the current item's last one.
struct ItemRings {
  u32 descriptors, tails;
  Ring<ITEM_STAGES> items;
  Ring<K_STAGES> K;
  Ring<1> V;

  DEVICE explicit ItemRings(u32 start)
      : descriptors(start + SharedMemory::ITEMS), tails(start + SharedMemory::TAIL_FULL),
        items{start + SharedMemory::ITEM_FULL, start + SharedMemory::ITEM_EMPTY},
        K{start + SharedMemory::K_FULL, start + SharedMemory::K_EMPTY},
        V{start + SharedMemory::V_FULL, start + SharedMemory::V_EMPTY} {}

  DEVICE u32 descriptor(u32 i) const { return descriptors + items.stage(i) * DESCRIPTOR_BYTES; }
  DEVICE void init() const {
    if constexpr (IS_PERSISTENT) items.init(1, 4 * CONSUMERS + 2);  // read by the warps of consumers and by both loaders
    K.init(KEY_TILES + PAIRED, 4 * CONSUMERS);  // PAIRED: with the atoms of the other block's K
    V.init(KEY_TILES, 4 * CONSUMERS);
    if constexpr (RAGGED) {
      mbarrier_init(tails, 1);
      mbarrier_init(tails + 8, 1);
    }
  }
  // Whether there is an item `i` for this block. If so, its descriptor may be read.
  DEVICE bool has(u32 i) const {
    if constexpr (!IS_PERSISTENT) return i == 0;
    items.wait_full(i);
    return int(ld_shared_u32(descriptor(i))) != NO_MORE_ITEMS;
  }
  // By every warp that reads the descriptor, after its last access; by single threads: release_alone(). A fence orders the
  // accesses of the thread that executes it: each lane fences, then warp_sync() orders all lanes before lane 0's arrival.
  DEVICE void release(u32 i, int lane) const {
    if constexpr (!IS_PERSISTENT) return;
    async_proxy_fence();  // the descriptor has been read, where the copy engine writes next
    warp_sync();
    items.release(i, lane);
  }
  DEVICE void release_alone(u32 i) const {
    if constexpr (!IS_PERSISTENT) return;
    async_proxy_fence();
    items.release(i, 0);
  }
};

// The buffers of a tile, and the rings that the loaders fill.
struct TileMemory {
  u32 K, V, Q, dO, dS, lse, neg_delta;
  ItemRings rings;
  Ring<NUM_STAGES> Q_ring;
  Ring<DO_STAGES> dO_ring;

  DEVICE explicit TileMemory(u32 start)
      : K(start + SharedMemory::K), V(start + SharedMemory::V), Q(start + SharedMemory::Q), dO(start + SharedMemory::DO),
        dS(start + SharedMemory::DS), lse(start + SharedMemory::LSE), neg_delta(start + SharedMemory::NEG_DELTA), rings(start),
        Q_ring{start + SharedMemory::Q_FULL, start + SharedMemory::Q_EMPTY},
        dO_ring{start + SharedMemory::DO_FULL, start + SharedMemory::DO_EMPTY} {}
};

// By the prepare pass: the descriptors of all items of persistent blocks.
DEVICE void prepare_items(const KernelParams& p) {
  if constexpr (!IS_PERSISTENT) return;
  const BackwardWorkspace workspace(p);
  for (u32 i = blockIdx.x * PASS_THREADS + threadIdx.x; i < workspace.num_items(p); i += gridDim.x * PASS_THREADS) {
    const NewItem found(p, i);
#pragma unroll
    for (int x = 0; x < ITEM_VECTORS; ++x) {
      st_global(workspace.items + i64(i) * ITEM_VECTORS + x, vector_of(found.descriptor, x));
    }
  }
}

// Takes the one item that a block is launched for. By one thread (IRREGULAR: by a warp), before a barrier of the block.
DEVICE void take_item(const KernelParams& p, u32 start) {
  if constexpr (IS_PERSISTENT) return;
  NewItem found(p, blockIdx.x / CLUSTER);
  if constexpr (IRREGULAR) {
    grid_await_previous();  // the prepare pass finds which tiles the mask's runs of rows hide
    found.list_tiles(p, start + SharedMemory::LIST);
    if (lane_id() != 0) return;
  }
  if constexpr (RAGGED) {
#pragma unroll
    for (int x = 0; x < 2; ++x) st_shared_vec4(start + SharedMemory::SEQUENCE + 16 * x, vector_of(found.sequence, x));
  }
#pragma unroll
  for (int x = 0; x < ITEM_VECTORS; ++x) st_shared_vec4(ItemRings(start).descriptor(0) + 16 * x, vector_of(found.descriptor, x));
}

// By one thread of a persistent block: the next item becomes item `i` of this block.
DEVICE void take_item(const KernelParams& p, const ItemRings& rings, u32 i) {
  const u32 index = atomic_add(BackwardWorkspace(p).next, 1), full = rings.items.full_barrier(i);
  rings.items.wait_empty(i);
  if (index >= BackwardWorkspace::num_items(p)) {
    st_shared_u32(rings.descriptor(i), u32(NO_MORE_ITEMS));
    mbarrier_arrive(full);
    return;
  }
  mbarrier_arrive_expect_tx(full, DESCRIPTOR_BYTES);
  bulk_load(rings.descriptor(i), BackwardWorkspace(p).items + i64(index) * ITEM_VECTORS, DESCRIPTOR_BYTES, full);
}

// A tile of an item, as single threads of the producer visit them.
struct TileVisit {
  KeyBlock block;
  QueryTile tile;
  u32 n;             // counts tiles over all items: the position in the rings of Q and dO
  u32 kv;            // counts items with tiles: the position in the rings of K and V
  bool first, last;  // of its item
};
// Calls `visit` for all tiles of all items of the thread block, in order. The thread that TAKES items asks for item i + 1 before
// it visits item i, and waits there until consumers have released item i - 2: they keep an item's descriptor until they have
// added its last dQ.
template <bool TAKES = false, typename Visit>
DEVICE void visit_items(const KernelParams& p, u32 start, const Visit& visit) {
  u32 n = 0, kv = 0;
  if constexpr (TAKES && IS_PERSISTENT) take_item(p, ItemRings(opaque(start)), 0);
  for (u32 i = 0;; ++i) {
    const ItemRings rings(opaque(start));
    if (!rings.has(i)) return;
    if constexpr (TAKES && IS_PERSISTENT) take_item(p, rings, i + 1);
    const KeyBlock block{p, rings.descriptor(i)};
    const u32 count = u32(block.count());
    if (count > 0) {
      QueryTile tile = block.first();
#pragma unroll 1  // unrolled, it takes more registers than a producer has
      for (const u32 end = n + count; n < end; ++n) {
        visit(TileVisit{block, tile, n, kv, n == end - count, n + 1 == end});
        tile = block.next(tile);
      }
      ++kv;
    }
    rings.release_alone(i);
  }
}

// By a thread that loads the first tile of an item: waits until the rows of the item's head are prepared.
DEVICE void await_prepared(const KeyBlock& block) {
  if constexpr (!IS_PERSISTENT) return;
  const BackwardWorkspace workspace(block.p);
  const u32 wanted = HeadBatches{block.p}.strips_of_kv_head();
  const u32* const counter = workspace.counter(block.p, PREPARED, block.head());
  while (ld_acquire_gpu(counter) != wanted) {
  }
  global_proxy_fence();  // the copy engine sees what the other blocks have written
}

// The counters of persistent blocks. Their place is read from the workspace, where the prepare pass has written it: computed, it
// would stay in registers over loops, and neither the producer nor consumers have any left.
DEVICE u32* where_counters_begin(const KernelParams& p) { return static_cast<u32*>(p.workspace) + opaque(1); }
DEVICE u32* counter(const KernelParams& p, Counter which, u32 i) {
  return static_cast<u32*>(p.workspace) + ld_global<u32>(where_counters_begin(p)) + which * HeadBatches{p}.heads() + i;
}

// Publishes that this warp has added to dQ for one key block of a head batch. By one lane: it waits for the copy engine's last
// addition; additions of the warp's lanes are released with the count.
DEVICE void publish_added(const KernelParams& p, u32 head_batch) {
  if constexpr (BULK_ADD) bulk_wait();
  red_release_gpu_add(counter(p, ADDED, head_batch), 1);
}
