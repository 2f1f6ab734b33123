// mbarrier objects: arrivals, bytes, phases.
#include "host/runtime.h"

namespace cufa_host {

static void complete_phase(Block& block, Mbarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  if (block.checked) {
    barrier.completed.join(barrier.arrived);
    barrier.arrived.clear(block.cluster.clocks.size);
    barrier.received.join(barrier.sent);
    barrier.sent.clear(block.cluster.clocks.size);
  }
  resume(barrier.waiting);
}

Mbarrier& mbarrier_at(Thread& thread, u32 address, Site site) {
  const auto found = thread.block->mbarriers.find(address);
  if (found != thread.block->mbarriers.end()) return found->second;
  abandon(thread, "barrier", site, "no mbarrier was initialised at shared offset ", offset_of(address));
}

// The block `target` has the barrier.
static void arrive(Thread& thread, Block& target, Mbarrier& barrier, u32 address, u32 bytes, Site site) {
  if (thread.block->checked) thread.block->races.release(thread, barrier.arrived);
  if (barrier.missing == 0) {
    abandon(thread, "barrier", site, "more arrivals than the ", barrier.arrivals, " that the mbarrier at shared offset ",
            offset_of(address), " takes");
  }
  --barrier.missing;
  barrier.bytes += bytes;
  complete_phase(target, barrier);
}

static void wait(u32 address, u32 parity, bool from_cluster, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Mbarrier& barrier = mbarrier_at(thread, address, site);
  if (block.checked) block.races.access(thread, address, 8, Access::read, site);
  ++block.counters.mbarrier_waits;
  while (barrier.phase % 2 == (parity & 1)) {  // the phase of this parity is still the present one
    barrier.waiting.push_back(&thread);
    park(thread, parity & 1 ? "mbarrier (parity 1)" : "mbarrier (parity 0)", site);
  }
  if (!block.checked) return;
  block.races.acquire(thread, barrier.completed);
  if (from_cluster) block.races.acquire(thread, barrier.received);
}

void land_bytes(Block& block, Mbarrier& barrier, u32 bytes) {
  barrier.bytes -= bytes;
  complete_phase(block, barrier);
}

}  // namespace cufa_host

void mbarrier_init(u32 address, u32 arrivals, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!shared_bytes(thread, address, 8, "mbarrier.init", site)) return;
  if (block.checked) block.races.access(thread, address, 8, Access::write, site);
  Mbarrier& barrier = block.mbarriers[address];
  barrier = Mbarrier();
  barrier.arrivals = barrier.missing = arrivals;
  if (!block.checked) return;
  barrier.initialiser = thread.number;
  barrier.initialised = block.cluster.clocks.time[thread.number / 32];
  for (VectorClock* clock : {&barrier.arrived, &barrier.completed, &barrier.sent, &barrier.received}) {
    clock->clear(block.cluster.clocks.size);
  }
}
void mbarrier_init_fence() {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!block.checked) return;
  for (auto& [address, barrier] : block.mbarriers) {
    if (barrier.initialiser == thread.number && !barrier.fenced) barrier.fenced = block.cluster.clocks.time[thread.number / 32];
  }
}

void mbarrier_arrive(u32 address, Site site) { mbarrier_arrive_expect_tx(address, 0, site); }
void mbarrier_arrive_expect_tx(u32 address, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Mbarrier& barrier = mbarrier_at(thread, address, site);
  if (block.checked) block.races.access(thread, address, 8, Access::read, site);  // against its initialisation
  arrive(thread, block, barrier, address, bytes, site);
}
// A relaxed arrival orders what the thread has read, and not its stores; the host does not tell them apart (blind_spots.py).
void mbarrier_arrive_cluster_relaxed(u32 address, Site site) {
  Thread& thread = current();
  u32 smem;
  Block* const target = block_of(thread, address, smem);
  if (!target || !target->mbarriers.count(smem)) {
    abandon(thread, "barrier", site, "no mbarrier was initialised at the cluster's address given");
  }
  Mbarrier& barrier = target->mbarriers[smem];
  if (thread.block->checked) {
    if (target != thread.block && !target->races.can_store(thread, site)) return;
    check_announced(thread, *target, barrier, smem, site);
  }
  arrive(thread, *target, barrier, smem, 0, site);
}

void mbarrier_wait(u32 address, u32 parity, Site site) { wait(address, parity, false, site); }
void mbarrier_wait_cluster(u32 address, u32 parity, Site site) { wait(address, parity, true, site); }
