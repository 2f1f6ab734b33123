// How dQ is added up in Hopper's backward kernels: every key block adds to the tiles of the workspace that it visits, either each
// warp from its registers or, BULK_ADD, the copy engine from shared memory, where warps have staged dQ.
//
// DETERMINISTIC: the key blocks of a head add to a tile from right to left; a key block's ticket is the number of key blocks that
// add before it. No consumer waits for a ticket: threads of the producer do, so that products go on meanwhile. With BULK_ADD
// these threads start the additions (DqAdder); else they signal consumers to add (TicketKeeper).
#pragma once
#include "backward/common/listed_tickets.cuh"
#include "backward/fa3_common/items.cuh"

constexpr int ADDERS = 2;  // threads: to await a ticket, add and pass the ticket on takes longer than a tile of head dim 128

// BULK_ADD: consumers fill it, a DqAdder empties it. Else a TicketKeeper fills it; consumers empty it after they have added.
using DqHandover = Ring<1>;
DEVICE DqHandover dq_handover(u32 start) { return {start + SharedMemory::DQ_FULL, start + SharedMemory::DQ_EMPTY}; }
DEVICE void init_dq_handover(u32 start) {
  dq_handover(start).init(BULK_ADD ? 4 * CONSUMERS : 1, BULK_ADD ? 1 : 4 * CONSUMERS);
}

// The address of a tile's row strip `strip`, from accumulator `first` on.
DEVICE float* dq_address(const KernelParams& p, u32 tile, int strip, int first) {
  return BackwardWorkspace::tile(p, tile) + (strip * D_TILES + first) * ACCUMULATOR;
}

// Adds the first `existing` of TILES accumulators, from registers.
template <int TILES>
DEVICE void add_dq(float* target, const float (&d)[4 * TILES], int existing, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    if (t < existing) red_add_f32x4(target + t * ACCUMULATOR + lane * 4, d[4 * t], d[4 * t + 1], d[4 * t + 2], d[4 * t + 3]);
  }
}

// Stages a warp's dQ in a buffer that the copy engine has read.
template <int TILES>
DEVICE void stage_dq(u32 staged, const float (&d)[4 * TILES], int lane) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    st_shared_vec4(staged + t * (ACCUMULATOR * 4) + lane * 16, {float_as_u32(d[4 * t]), float_as_u32(d[4 * t + 1]),
                                                                float_as_u32(d[4 * t + 2]), float_as_u32(d[4 * t + 3])});
  }
  async_proxy_fence();
  warp_sync();  // all lanes have stored
}

// The counter of key blocks that have added to a tile. PAIRED: one per rank, as the two blocks of a pair add different columns.
DEVICE u32* ticket_counter(const KeyBlock& block, QueryTile tile, u32 rank) {
  return BackwardWorkspace::ticket(block.p, block.workspace_tile(tile)) + rank;
}
DEVICE u32 ticket_of(const KeyBlock& block, QueryTile tile) {
  if constexpr (LISTED_TICKETS) {
    return ListedTickets(block.p).of(block.p, block.batch(), block.kv_head(), block.k_block(), block.q_tile(tile));
  }
  return key_blocks_before<Br, Bc>(block.mask(), tile.q_tile, block.k_block());
}
DEVICE void await_ticket(const KeyBlock& block, QueryTile tile, u32 rank = 0) {
  const u32 ticket = ticket_of(block, tile);
  while (!ticket_has_come(ld_acquire_gpu(ticket_counter(block, tile, rank)), ticket)) {
  }
}
DEVICE void pass_ticket(const KeyBlock& block, QueryTile tile, u32 rank = 0) {
  red_release_gpu_add(ticket_counter(block, tile, rank), 1);
}

// DETERMINISTIC and BULK_ADD: one of ADDERS threads, which share the tiles. Memory has dQ_handover and add_staged().
template <typename Memory>
struct DqAdder {
  const KernelParams& p;
  const u32 start;  // of the shared memory
  const u32 adder;

  DEVICE void run() const {
    visit_items(p, start, [&](const TileVisit& at) {
      if (at.n % ADDERS != adder) return;
      const Memory smem(opaque(start));
      const DqHandover staged = smem.dQ_handover;
      await_ticket(at.block, at.tile);
      staged.wait_empty(at.n);  // the other adder has drained tile n - 1: wait_full(n) could else match an older phase
      staged.wait_full(at.n);
      smem.add_staged(p, at.block.workspace_tile(at.tile));
      bulk_commit();
      bulk_wait_read();
      staged.release(at.n, 0);
      bulk_wait();  // the sums are in memory, not only read from shared memory
      pass_ticket(at.block, at.tile);
    });
  }
};

// DETERMINISTIC without BULK_ADD. While consumers add to a tile, the keeper checks the next tile's ticket. If that ticket has
// come, the keeper signals consumers first and passes this tile's ticket on second: each of the two steps takes long.
struct TicketKeeper {
  const KernelParams& p;
  const u32 start;  // of the shared memory
  const u32 rank;   // of the block in its pair

  DEVICE void run() const {
    bool signalled = false;
    visit_items(p, start, [&](const TileVisit& at) {
      const DqHandover handover = dq_handover(opaque(start));
      if (!signalled) {
        await_ticket(at.block, at.tile, rank);
        mbarrier_arrive(handover.full_barrier(at.n));
      }
      signalled = !at.last && has_ticket(at.block, at.block.next(at.tile));
      handover.wait_empty(at.n + 1);
      if (signalled) mbarrier_arrive(handover.full_barrier(at.n + 1));
      pass_ticket(at.block, at.tile, rank);
    });
  }
  DEVICE bool has_ticket(const KeyBlock& block, QueryTile tile) const {
    return ticket_has_come(ld_acquire_gpu(ticket_counter(block, tile, rank)), ticket_of(block, tile));
  }
};
