#include "host/runtime.h"

namespace cufa_host {
namespace {

// A thread comes to a named barrier. Returns true when it is the last one, after letting the others go.
bool arrive(Thread& thread, int id, u32 num_threads, bool waits, Site site) {
  Block& block = *thread.block;
  if (id < 0 || id >= kNumBarriers || num_threads % 32 || num_threads > u32(block.num_threads)) {
    abandon(block, "barrier", site,
            "barrier " + std::to_string(id) + " with " + std::to_string(num_threads) +
                " threads does not exist: " + describe(thread) + " at " + describe(site));
  }
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived && barrier.expected != num_threads) {
    abandon(block, "barrier", site,
            "barrier " + std::to_string(id) + " expects " + std::to_string(barrier.expected) + " threads, but " +
                describe(thread) + " says " + std::to_string(num_threads) + " at " + describe(site));
  }
  barrier.expected = num_threads;
  if (block.checked) block.races.release(thread, barrier.clock);
  if (waits) barrier.waiting.push_back(&thread);
  if (++barrier.arrived < num_threads) return false;
  for (Thread* other : barrier.waiting) {
    other->warp->ready |= other->bit();
    if (block.checked) block.races.acquire(*other, barrier.clock);
    if (other->lane == 0) ++block.counters.barrier_waits;
    if (block.counted && other->lane == 31) other->warp->log.flush(block.counters);
  }
  barrier.arrived = 0;
  barrier.waiting.clear();
  return true;
}

const Collective kWarpSync = {"__syncwarp",
                              [](Block& block, Warp& warp) {
                                ++block.counters.warp_syncs;
                                if (!block.checked) return;
                                VectorClock all(block.cluster.clocks.size);
                                for (int i = 0; i < 32; ++i) block.races.release(block.thread(warp, i), all);
                                for (int i = 0; i < 32; ++i) block.races.acquire(block.thread(warp, i), all);
                              },
                              false};

}  // namespace

void barrier_sync(int id, int num_threads, Site site) {
  Thread& thread = current();
  if (!arrive(thread, id, num_threads, true, site)) park(thread, id ? "bar.sync" : "the block's barrier", site);
}

void barrier_arrive(int id, int num_threads, Site site) { arrive(current(), id, num_threads, false, site); }

void block_barrier(Site site) { barrier_sync(0, current().block->num_threads, site); }

void warp_barrier(Site site) { rendezvous(current(), kWarpSync, site); }

}  // namespace cufa_host
