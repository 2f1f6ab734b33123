// barrier.cluster, arrival and wait apart.
#include <algorithm>

#include "host/cluster.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

std::string place(Warp& warp, Block& block) { return describe(block.thread(warp, 0)) + " at " + describe(warp.site); }

template <bool RELEASE>
void arrive(Block& block, Warp& warp) {
  Cluster& cluster = block.cluster;
  if (warp.cluster_pending) {
    abandon(block, "barrier", warp.site, "arrives at the cluster's barrier twice without a wait: " + place(warp, block));
  }
  warp.cluster_pending = true;
  warp.cluster_phase = cluster.barrier.phase + 1;
  if (block.checked && RELEASE) {
    for (int i = 0; i < 32; ++i) block.races.release(block.thread(warp, i), cluster.barrier.arrived);
  }
  for (auto& [address, mbarrier] : block.mbarriers) {
    if (mbarrier.initialiser / 32 == block.thread(warp, 0).number / 32 && mbarrier.fenced && !mbarrier.told) {
      mbarrier.told = warp.cluster_phase;
    }
  }
  cluster.complete_phase();
}

void begin_wait(Block& block, Warp& warp) {
  if (!warp.cluster_pending) {
    abandon(block, "barrier", warp.site, "waits at the cluster's barrier without having arrived: " + place(warp, block));
  }
  warp.cluster_pending = false;
  ++block.counters.barrier_waits;
}

const Collective kArrive[] = {{"barrier.cluster.arrive.relaxed", arrive<false>, true},
                              {"barrier.cluster.arrive", arrive<true>, true}};
const Collective kWait = {"barrier.cluster.wait", begin_wait, true};

}  // namespace

void Cluster::reset_barrier() {
  barrier.phase = 0;
  barrier.waiting.clear();
  barrier.arrived.clear(clocks.size);
  barrier.completed.clear(clocks.size);
}

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
  for (Thread* thread : barrier.waiting) thread->warp->ready |= thread->bit();
  barrier.waiting.clear();
}

std::string Cluster::who_is_missing() {
  std::string text;
  for (auto& block : blocks) {
    for (const Warp& warp : block->warps) {
      if (!warp.alive || warp.cluster_phase == barrier.phase + 1) continue;
      text += (text.empty() ? "" : ", ") + describe(block->index) + " warp " + std::to_string(warp.index);
    }
  }
  return "at the cluster's barrier is missing " + text;
}

void arrive_at_cluster(bool release, Site site) { rendezvous(current(), kArrive[release], site); }

void wait_for_cluster(Site site) {
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

void leave_cluster(Thread& thread) {
  Block& block = *thread.block;
  if (block.checked) block.races.leave(thread);
  if (!thread.warp->alive) block.cluster.complete_phase();
}

}  // namespace cufa_host
