#include "host/mbarrier.h"

#include "host/cluster.h"
#include "host/hopper_host.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

void complete_phase(Block& block, Mbarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  if (block.checked) {
    barrier.completed.join(barrier.arrived);
    barrier.arrived.clear(block.cluster.clocks.size);
    barrier.received.join(barrier.sent);
    barrier.sent.clear(block.cluster.clocks.size);
  }
  for (Thread* thread : barrier.waiting) thread->warp->ready |= thread->bit();
  barrier.waiting.clear();
}

Mbarrier& find(Thread& thread, u32 address, Site site) {
  const auto found = thread.block->mbarriers.find(address);
  if (found == thread.block->mbarriers.end()) {
    abandon(*thread.block, "barrier", site,
            "no mbarrier was initialised at shared offset " + std::to_string(address - kSharedBase) + ": " +
                describe(thread) + " at " + describe(site));
  }
  return found->second;
}

}  // namespace

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
    if (barrier.initialiser == thread.number && !barrier.fenced) {
      barrier.fenced = block.cluster.clocks.time[thread.number / 32];
    }
  }
}

// `target` has the barrier.
static void arrive(Thread& thread, Block& target, Mbarrier& barrier, u32 address, u32 bytes, Site site) {
  Block& block = *thread.block;
  if (block.checked) block.races.release(thread, barrier.arrived);
  if (barrier.missing == 0) {
    abandon(block, "barrier", site,
            "more arrivals than the " + std::to_string(barrier.arrivals) + " that the mbarrier at shared offset " +
                std::to_string(address - kSharedBase) + " takes: " + describe(thread) + " at " + describe(site));
  }
  --barrier.missing;
  barrier.bytes += bytes;
  complete_phase(target, barrier);
}

void mbarrier_arrive(u32 address, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Mbarrier& barrier = find(thread, address, site);
  if (block.checked) block.races.access(thread, address, 8, Access::read, site);  // against its initialisation
  arrive(thread, block, barrier, address, bytes, site);
}

// Relaxed: what the thread has read is ordered by it, and nothing that it wrote, which this does not see (blind_spots.py).
void arrive_in_cluster(u32 address, Site site) {
  Thread& thread = current();
  u32 smem;
  Block* const target = block_of(thread, address, smem);
  const auto none = [&] {
    abandon(*thread.block, "barrier", site,
            "no mbarrier was initialised at the cluster's address given: " + describe(thread) + " at " + describe(site));
  };
  if (!target) none();
  const auto found = target->mbarriers.find(smem);
  if (found == target->mbarriers.end()) none();
  if (thread.block->checked) {
    if (target != thread.block && !target->races.can_store(thread, site)) return;
    check_told(thread, *target, found->second, smem, site);
  }
  arrive(thread, *target, found->second, smem, 0, site);
}

void mbarrier_wait(u32 address, u32 parity, bool from_cluster, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Mbarrier& barrier = find(thread, address, site);
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
