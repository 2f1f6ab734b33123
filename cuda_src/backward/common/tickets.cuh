// The order in which key blocks add to a tile of dQ, if it is fixed (DETERMINISTIC).
#pragma once
#include "primitives/semaphore.cuh"
#include "backward/common/listed_tickets.cuh"
#include "backward/common/schedule.cuh"

// DETERMINISTIC: key blocks add to a tile of dQ from right to left: a block's ticket is the number of key blocks that add before
// it. Blocks are launched in that order, and a causal block begins at its diagonal, where its ticket is 0: waits are short.
//
// In terms of PTX's memory model: a block's additions happen before its pass_on(), through the barrier between them. pass_on() is
// a release, with which the acquire of count() synchronizes when it reads the new count (through the read-modify-writes of all
// earlier tickets). A barrier orders that acquire before the additions of the next block. Additions to one float come in the
// order of tickets.
template <int BR, int BC>
struct DqTickets {
  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  int k_block;
  i64 first_head;  // of the sequence
  const HeadMask* mask = nullptr;  // LENGTHS: of the sequence
  u32 first_tile = 0;  // LENGTHS: of the sequence
  int sequence_index = 0;  // PACKED

  // Key blocks that have added to a tile.
  DEVICE u32 count(QueryTile tile) const { return ld_acquire_gpu(counter(tile)); }

  // By one thread, before the barrier that precedes the additions. `found`: the last result of count().
  DEVICE void await(QueryTile tile, u32 found) const {
    u32 ticket;
    if constexpr (LISTED_TICKETS) {
      const int batch = LENGTHS_KIND == PACKED ? sequence_index : int(first_head / p.heads);
      ticket = ListedTickets(p).of(p, batch, tile.head / (p.heads / p.kv_heads), k_block, tile.q_tile);
    } else {
      ticket = key_blocks_before<BR, BC>(LENGTHS_KIND == DENSE ? head_mask(p) : *mask, tile.q_tile, k_block);
    }
    while (!ticket_has_come(found, ticket)) found = count(tile);
  }

  // By one thread, after the barrier that follows the additions.
  DEVICE void pass_on(QueryTile tile) const { red_release_gpu_add(counter(tile), 1); }

 private:
  DEVICE u32* counter(QueryTile tile) const {
    if constexpr (LENGTHS_KIND == PACKED) {
      return workspace.tickets + i64(tile.head) * workspace.tiles(p) + first_tile + tile.q_tile;
    }
    return workspace.tickets + (first_head + tile.head) * ((p.seqlen_q - 1) / BR + 1) + tile.q_tile;
  }
};
