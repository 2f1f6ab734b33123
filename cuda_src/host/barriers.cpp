// Named barriers of a block, and __syncwarp.
#include "host/runtime.h"

namespace cufa_host {
namespace {

// A thread comes to a named barrier. Returns whether it is the last one, after letting the others go.
bool arrive(Thread& thread, int id, u32 num_threads, bool waits, Site site) {
  Block& block = *thread.block;
  if (id < 0 || id >= kNumBarriers || num_threads % 32 || num_threads > u32(block.num_threads)) {
    abandon(thread, "barrier", site, "barrier ", id, " with ", num_threads, " threads does not exist");
  }
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived && barrier.expected != num_threads) {
    abandon(block, "barrier", site,
            text_of("barrier ", id, " expects ", barrier.expected, " threads, but ", thread, " says ", num_threads, " at ",
                    site));
  }
  barrier.expected = num_threads;
  if (block.checked) block.races.release(thread, barrier.clock);
  if (waits) barrier.waiting.push_back(&thread);
  if (++barrier.arrived < num_threads) return false;
  for (Thread* other : barrier.waiting) {
    if (block.checked) block.races.acquire(*other, barrier.clock);
    if (other->lane == 0) ++block.counters.barrier_waits;
    if (block.counted && other->lane == 31) other->warp->log.flush(block.counters);
  }
  barrier.arrived = 0;
  resume(barrier.waiting);
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
}  // namespace cufa_host

void bar_sync(int id, int num_threads, Site site) {
  Thread& thread = current();
  if (!arrive(thread, id, num_threads, true, site)) park(thread, id ? "bar.sync" : "the block's barrier", site);
}
void bar_arrive(int id, int num_threads, Site site) { arrive(current(), id, num_threads, false, site); }
void block_sync(Site site) { bar_sync(0, current().block->num_threads, site); }
void warp_sync(Site site) { rendezvous(current(), kWarpSync, site); }
