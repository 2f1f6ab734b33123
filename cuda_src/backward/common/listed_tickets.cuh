// DETERMINISTIC under irregular masks: a key block's ticket at a tile of dQ, the number of key blocks that add before it. Ranges
// do not give it: the prepare pass is launched again, in a grid of two layers, to count it once the masks are prepared.
#pragma once
#include "backward/common/mask_by_keys.cuh"
#include "backward/common/workspace.cuh"

// Tickets (mask heads or key/value heads, key blocks, query tiles), directly before the mask's part of the workspace. With
// LENGTHS, and under masks with sets of tokens, each sequence has its own.
struct ListedTickets {
  static constexpr bool BY_SEQUENCE = MASK_KIND == MASK_SETS || LENGTHS_KIND != DENSE;
  u32* tickets;
  u32 blocks, tiles, heads_of_sequence, heads;

  DEVICE explicit ListedTickets(const BackwardParams& p)
      : blocks(u32(p.seqlen_k - 1) / BLOCK_KV + 1), tiles(u32(p.seqlen_q - 1) / BLOCK_Q + 1),
        heads_of_sequence(MASK_KIND == MASK_SETS ? 1u : u32(min(p.mask.heads, p.kv_heads))),
        heads((BY_SEQUENCE ? u32(p.batch) : u32(p.mask.sequences)) * heads_of_sequence) {
    const i64 bytes = (i64(heads) * blocks * tiles * 4 + 15) / 16 * 16;
    tickets = reinterpret_cast<u32*>(static_cast<char*>(p.workspace) + p.mask.workspace - bytes);
  }

  DEVICE u32 of(const BackwardParams& p, int batch, int kv_head, int k_block, int q_tile) const {
    const int sequence = BY_SEQUENCE || p.mask.sequences > 1 ? batch : 0;
    const i64 head = i64(sequence) * heads_of_sequence + (heads_of_sequence > 1 ? kv_head : 0);
    return ld_global<u32>(tickets + (head * blocks + k_block) * tiles + q_tile);
  }

  // Warp `index` of the grid lists the tickets of one query tile of a head: key blocks count from right to left, 32 at a time.
  DEVICE void find(const BackwardParams& p, i64 index) const {
    if (index >= i64(heads) * tiles) return;
    const int head = int(index / tiles), tile = int(index % tiles), of_sequence = int(heads_of_sequence), lane = lane_id();
    u32 count = 0;
    for (int last = int(blocks) - 1; last >= 0; last -= 32) {
      const int block = last - lane;
      bool exists = block >= 0;
      if constexpr (LENGTHS_KIND != DENSE) exists = exists && tile < classified_query_tiles(p, block, head / of_sequence);
      const bool some = exists && class_of_query_tile(p, block, head / of_sequence, head % of_sequence, tile).some;
      u32 sum = some;  // over this lane and all lanes before it
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const u32 before = shfl(sum, lane - distance & 31);
        if (lane >= distance) sum += before;
      }
      if (block >= 0) st_global(tickets + (i64(head) * blocks + block) * tiles + tile, count + sum - u32(some));
      count += shfl(sum, 31);
    }
  }
};

// The prepare pass calls this first. Its second launch lists the tickets and returns true; the first returns false.
template <int THREADS>
DEVICE bool found_tickets(const BackwardParams& p) {
  if constexpr (LISTED_TICKETS) {
    if (gridDim.y > 1) {
      ListedTickets(p).find(p, ((i64(blockIdx.x) * 2 + blockIdx.y) * THREADS + threadIdx.x) / 32);
      return true;
    }
  }
  return false;
}
