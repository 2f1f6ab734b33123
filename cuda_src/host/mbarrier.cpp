#include "host/mbarrier.h"

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

void mbarrier_arrive(u32 address, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Mbarrier& barrier = find(thread, address, site);
  if (block.checked) {
    block.races.access(thread, address, 8, Access::read, site);  // against its initialisation
    block.races.release(thread, barrier.arrived);
  }
  count_arrival(block, barrier, address, bytes, thread, site);
}

void count_arrival(Block& block, Mbarrier& barrier, u32 address, u32 bytes, Thread& thread, Site site) {
  if (barrier.missing == 0) {
    abandon(*thread.block, "barrier", site,
            "more arrivals than the " + std::to_string(barrier.arrivals) + " that the mbarrier at shared offset " +
                std::to_string(address - kSharedBase) + " takes: " + describe(thread) + " at " + describe(site));
  }
  --barrier.missing;
  barrier.bytes += bytes;
  complete_phase(block, barrier);
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
