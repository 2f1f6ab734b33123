// The workspace in device memory that the three passes of a backward kernel share: dQ in float32, to which every key block adds;
// lse and delta of each query row; and, DETERMINISTIC, a ticket counter of each tile of dQ: the key blocks that have added to it.
//
// dQ is stored as 16 x 8 accumulators of mma.sync, one after another, so that a warp adds 512 adjacent bytes at a time; the
// convert pass puts dQ in order. Each head begins with its own row strip: if seqlen_q is not a multiple of 16, up to 15 rows per
// head are padding. WHOLE_TILES: a head has whole query tiles instead, each with lse and -delta of its rows after its dQ: one
// index gives every address without a bounds test. 128 bytes precede the tiles: word 0 is the index of the next item, word 1 the
// offset, in words, of the counters (both for persistent blocks).
//
// Packed sequences: a head's strips and tiles are numbered over all sequences; no two share one (first_packed_block).
#pragma once
#include "backward/params.cuh"
#include "primitives/opaque.cuh"
#include "primitives/reduction.cuh"
#include "shared/element.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/schedule.cuh"

// From sm_90 on one red instruction adds a lane's four elements, which are adjacent. Older GPUs take four instructions, each for
// 128 adjacent bytes of a warp.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool WIDE_ADDITIONS = false;
#else
constexpr bool WIDE_ADDITIONS = true;
#endif

constexpr int STRIP = 16;                // rows of one accumulator
constexpr int D_TILES = HEAD_DIM / 8;    // accumulators side by side
constexpr int ACCUMULATOR = STRIP * 8;   // floats

// Two floats per row: lse in units of log2 (P = exp2(scale_log2 * s - lse); float32: natural log), and
// delta = rowsum(dO o O) - dlse.
constexpr int ROW_STATS_BYTES = 8;

constexpr int ITEM_VECTORS = 3;  // 16-byte vectors of an ItemDescriptor (backward/fa3_common/block.cuh)
constexpr int TILE_STRIPS = BLOCK_Q / STRIP;

constexpr int STRIP_FLOATS = STRIP * HEAD_DIM;
constexpr int TILE_DQ_FLOATS = BLOCK_Q * HEAD_DIM;
// WHOLE_TILES: workspace of one query tile, in memory order: dQ, lse of each row, -delta of each row, the tile's ticket counters.
constexpr int TILE_FLOATS = TILE_DQ_FLOATS + BLOCK_Q * 2 + (DETERMINISTIC ? 32 : 0);
constexpr int HEADER_FLOATS = 32;  // before the tiles, which begin at cache lines of 128 bytes
static_assert(!WHOLE_TILES || TILE_FLOATS % 32 == 0, "tiles of the workspace begin on cache lines");

// Whether the addition order is fixed and does not follow from a band: tickets are listed (listed_tickets.cuh).
constexpr bool LISTED_TICKETS = DETERMINISTIC && is_irregular(MASK_KIND);
// Whether key blocks are ordered by head batches, in any addition order.
constexpr bool BY_HEAD_BATCHES = WHOLE_TILES && !DETERMINISTIC && !is_irregular(MASK_KIND) && LENGTHS_KIND == DENSE;
// Whether persistent blocks take one key block after another, and do most of the prepare and convert passes meanwhile
// (backward/fa3_common/background.cuh). Not DETERMINISTIC: blocks would wait for one another's tickets. Not with listed tiles or
// lengths: an item then has more than its descriptor. Not with a soft cap (consumers lack registers) or a sink (the passes do).
constexpr bool IS_PERSISTENT = PERSISTENT && BY_HEAD_BATCHES && !SOFTCAP && !SINK;

// BY_HEAD_BATCHES, and LISTED_TICKETS unless packed: head batches of key/value heads, so that dQ of a few head batches lies in
// the L2 cache at a time. IS_PERSISTENT: while key blocks add to one head batch, other warps prepare the next ones and convert
// the previous ones (backward/fa3_common/background.cuh). The prepare pass does the first head batches, the convert pass the last
// ones. The planner chooses their number and size (cufa/schedule/key_order.py).
struct HeadBatches {
  const BackwardParams& p;
  DEVICE u32 heads() const { return u32(p.batch) * opaque(u32(p.kv_heads)); }
  // Head batches before the last one, which has the remaining heads.
  DEVICE u32 whole() const { return u32(p.whole_head_batches); }
  DEVICE u32 first(u32 head_batch) const { return head_batch * u32(p.heads_per_head_batch); }
  DEVICE u32 end(u32 head_batch) const { return head_batch < whole() ? first(head_batch + 1) : heads(); }
  DEVICE u32 of_head(u32 head) const { return min(head / u32(p.heads_per_head_batch), whole()); }
  DEVICE u32 strips_of_kv_head() const { return u32(p.strips_per_head); }
  // The first row strip that the convert pass converts.
  DEVICE u32 left() const { return first(u32(p.head_batches_converted)) * strips_of_kv_head(); }
};

// IS_PERSISTENT. PREPARED counts the prepared strips of each key/value head. The others count for each head batch: ADDED the
// warps that have added all of a key block, TO_PREPARE and TO_CONVERT the runs of strips that warps have taken.
enum Counter { PREPARED, ADDED, TO_PREPARE, TO_CONVERT };

struct BackwardWorkspace {
  float* dQ;   // (batch * heads, strips, D_TILES) accumulators; WHOLE_TILES: (batch * heads, tiles, TILE_FLOATS)
  char* rows;  // (batch * heads, seqlen_q) of ROW_STATS_BYTES; WHOLE_TILES: none
  u32* next;   // WHOLE_TILES: index of the next item, taken by persistent blocks
  vec4* items;  // IS_PERSISTENT: (key blocks * batch * kv_heads, ITEM_VECTORS), in the order in which they are taken
  u32* tickets;  // DETERMINISTIC: ticket counters (batch * heads, query tiles); WHOLE_TILES: none, they lie in the tiles
  u32* counters;  // IS_PERSISTENT: (4, batch * kv_heads), of each Counter
  float* sinks;  // SINK: (batch * heads, strips), the addend of each strip to dsink; WHOLE_TILES: before the items
  i32 strips;  // of a head

  DEVICE explicit BackwardWorkspace(const BackwardParams& p) {
    const i64 heads = num_heads(p);
    next = static_cast<u32*>(p.workspace);
    dQ = static_cast<float*>(p.workspace) + (WHOLE_TILES ? HEADER_FLOATS : 0);
    strips = WHOLE_TILES ? tiles(p) * TILE_STRIPS
             : LENGTHS_KIND == PACKED ? num_packed_blocks<STRIP>(p.total_q, p.batch) : (p.seqlen_q - 1) / STRIP + 1;
    rows = reinterpret_cast<char*>(dQ + heads * strips * STRIP_FLOATS);
    items = reinterpret_cast<vec4*>(dQ + heads * tiles(p) * TILE_FLOATS);
    tickets = reinterpret_cast<u32*>(rows + heads * (LENGTHS_KIND == PACKED ? p.total_q : p.seqlen_q) * ROW_STATS_BYTES);
    sinks = reinterpret_cast<float*>(tickets + (DETERMINISTIC ? heads * tiles(p) : 0));
    if constexpr (WHOLE_TILES && SINK) {
      sinks = reinterpret_cast<float*>(items);
      items = reinterpret_cast<vec4*>(sinks + heads * strips);
    }
    counters = reinterpret_cast<u32*>(items + i64(num_items(p)) * ITEM_VECTORS);
  }

  // Heads over the batch; packed: over all sequences.
  DEVICE static i64 num_heads(const BackwardParams& p) {
    return LENGTHS_KIND == PACKED ? i64(p.heads) : i64(p.batch) * p.heads;
  }
  // Query tiles of a head.
  DEVICE static u32 tiles(const BackwardParams& p) {
    return LENGTHS_KIND == PACKED ? num_packed_blocks<BLOCK_Q>(p.total_q, p.batch) : u32(p.seqlen_q - 1) / BLOCK_Q + 1;
  }

  // WHOLE_TILES: the ticket counter of tile `index` over all heads; of a pair of blocks, the first of two counters.
  DEVICE static u32* ticket(const BackwardParams& p, u32 index) {
    return reinterpret_cast<u32*>(tile(p, index) + TILE_DQ_FLOATS + BLOCK_Q * 2);
  }
  DEVICE static u32 num_items(const BackwardParams& p) {
    return (u32(p.seqlen_k - 1) / BLOCK_KV + 1) * u32(p.batch) * u32(p.kv_heads);
  }
  // WHOLE_TILES: tile `index` over all heads.
  DEVICE static float* tile(const BackwardParams& p, u32 index) {
    return static_cast<float*>(p.workspace) + HEADER_FLOATS + i64(index) * TILE_FLOATS;
  }

  DEVICE u32* counter(const BackwardParams& p, Counter which, u32 i) const {
    return counters + which * HeadBatches{p}.heads() + i;
  }

  // The accumulators of strip `index` over all heads.
  DEVICE float* strip(i64 index) const {
    if constexpr (WHOLE_TILES) {
      const u32 i = u32(index);
      return dQ + i64(i / TILE_STRIPS) * TILE_FLOATS + i % TILE_STRIPS * STRIP_FLOATS;
    }
    return dQ + index * STRIP_FLOATS;
  }
  DEVICE float* strip(i64 head, int of_head) const { return strip(head * strips + of_head); }
  // WHOLE_TILES: lse of the first row of strip `index`; -delta follows BLOCK_Q floats later.
  DEVICE float* lse(i64 index) const {
    const u32 i = u32(index);
    return dQ + i64(i / TILE_STRIPS) * TILE_FLOATS + TILE_DQ_FLOATS + i % TILE_STRIPS * STRIP;
  }
};

// DETERMINISTIC: whether all `ticket` key blocks that add to a tile before this one have added; `count` is how many have. If
// packed lengths are invalid (fall_somewhere()), counters begin at UNORDERED, so that no block waits.
constexpr u32 UNORDERED = 1u << 31;
DEVICE bool ticket_has_come(u32 count, u32 ticket) { return LENGTHS_KIND == PACKED ? count >= ticket : count == ticket; }

// Where register `c` of `lane` lies in an accumulator.
DEVICE int accumulator_place(int lane, int c) { return WIDE_ADDITIONS ? lane * 4 + c : c * 32 + lane; }

DEVICE void add_accumulator(float* target, const float (&d)[4], int lane) {
  if constexpr (WIDE_ADDITIONS) {
    red_add_f32x4(target + lane * 4, d[0], d[1], d[2], d[3]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) red_add_f32(target + accumulator_place(lane, c), d[c]);
  }
}
