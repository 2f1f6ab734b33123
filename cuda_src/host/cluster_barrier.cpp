// barrier.cluster, whose arrival and wait are separate.
#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {
namespace {

template <bool RELEASE>
void arrive(Block& block, Warp& warp) {
  Cluster& cluster = block.cluster;
  Thread& first = block.thread(warp, 0);
  if (warp.cluster_pending) abandon(first, "barrier", warp.site, "arrives at the cluster's barrier twice without a wait");
  warp.cluster_pending = true;
  warp.cluster_phase = cluster.barrier.phase + 1;
  if (block.checked && RELEASE) {
    for (int i = 0; i < 32; ++i) block.races.release(block.thread(warp, i), cluster.barrier.arrived);
  }
  for (auto& [address, mbarrier] : block.mbarriers) {
    const bool fenced_here = mbarrier.initialiser / 32 == first.number / 32 && mbarrier.fenced;
    if (fenced_here && !mbarrier.announced) mbarrier.announced = warp.cluster_phase;
  }
  cluster.complete_phase();
}

const Collective kArriveRelaxed = {"barrier.cluster.arrive.relaxed", arrive<false>, true};
const Collective kArrive = {"barrier.cluster.arrive", arrive<true>, true};
const Collective kWait = {"barrier.cluster.wait",
                          [](Block& block, Warp& warp) {
                            if (!warp.cluster_pending) {
                              abandon(block.thread(warp, 0), "barrier", warp.site,
                                      "waits at the cluster's barrier without having arrived");
                            }
                            warp.cluster_pending = false;
                            ++block.counters.barrier_waits;
                          },
                          true};

}  // namespace

void Cluster::complete_phase() {
  const u32 next = barrier.phase + 1;
  for (auto& block : blocks) {
    for (const Warp& warp : block->warps) {
      if (warp.alive && warp.cluster_phase != next) return;
    }
  }
  barrier.phase = next;
  if (launch.mode == kChecked) {
    std::swap(barrier.completed, barrier.arrived);
    barrier.arrived.clear(clocks.size);
    barrier.completed[clocks.phases()] = next;
  }
  resume(barrier.waiting);
}

void leave_cluster(Thread& thread) {
  Block& block = *thread.block;
  if (block.checked) block.races.leave(thread);
  if (!thread.warp->alive) block.cluster.complete_phase();
}

}  // namespace cufa_host

void cluster_arrive(Site site) { rendezvous(current(), kArrive, site); }
void cluster_arrive_relaxed(Site site) { rendezvous(current(), kArriveRelaxed, site); }
void cluster_wait(Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  rendezvous(thread, kWait, site);
  ClusterBarrier& barrier = block.cluster.barrier;
  while (barrier.phase < thread.warp->cluster_phase) {
    barrier.waiting.push_back(&thread);
    park(thread, "the cluster's barrier", site);
  }
  if (block.checked) block.races.acquire(thread, barrier.completed);
}
