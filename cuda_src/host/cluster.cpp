// The blocks of a cluster run one after another.
#include "host/cluster.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

Cluster::Cluster(const CufaLaunch& l, Findings& f, Owners& o, int w) : launch(l), findings(f), owners(o), worker(w) {
  for (u32 rank = 0; rank < launch.cluster; ++rank) blocks.emplace_back(new Block(*this, rank));
}

Cluster::~Cluster() = default;

void Cluster::start(u32 first) {
  if (launch.mode == kChecked) clocks.reset(size() * launch.num_threads);
  barrier = {0, VectorClock(clocks.size), VectorClock(clocks.size), {}};
  counters.clear();
  for (auto& block : blocks) block->start(first + block->rank);
}

Cluster::State Cluster::run() {
  const auto one_lands = [](auto& block) { return land_one(*block) || land_one_store(*block); };
  for (;;) {
    bool progress = false;
    for (int i = 0; i < size(); ++i) {
      int rank = i;
      if (launch.schedule == kDescending) rank = size() - 1 - i;
      if (launch.schedule == kRandom && size() > 1) rank = random_number(*blocks[0]) % size();
      progress |= blocks[rank]->sweep();
      if (blocks[rank]->failed) return State::failed;
    }
    bool alive = false, polling = false;
    for (auto& block : blocks) {
      alive |= block->alive();
      progress |= block->ready();
      polling |= !block->polling.empty();
    }
    if (!alive) break;
    if (progress || std::any_of(blocks.begin(), blocks.end(), one_lands) || wake()) continue;
    if (polling) return State::waiting;
    report_stuck();
    return State::failed;
  }
  for (auto& block : blocks) {
    for (Warp& warp : block->warps) {
      if (block->counted) warp.log.flush(block->counters);
    }
  }
  return State::ended;
}

bool Cluster::wake() {
  bool any = false;
  for (auto& block : blocks) {
    const auto changed = [&](Thread* thread) {
      if (__atomic_load_n(thread->polled, __ATOMIC_SEQ_CST) == thread->polled_count) return false;
      thread->warp->ready |= thread->bit();
      return any = true;
    };
    std::vector<Thread*>& polling = block->polling;
    polling.erase(std::remove_if(polling.begin(), polling.end(), changed), polling.end());
  }
  return any;
}

// The warps that the cluster's barrier waits for.
static std::string missing_warps(Cluster& cluster) {
  std::string text;
  for (auto& block : cluster.blocks) {
    for (const Warp& warp : block->warps) {
      if (!warp.alive || warp.cluster_phase == cluster.barrier.phase + 1) continue;
      text += text_of(text.empty() ? "" : ", ", block->index, " warp ", warp.index);
    }
  }
  return text;
}

void Cluster::report_stuck() {
  Block& first = *blocks.front();
  bool divergent = false;  // some lanes are at a collective that the other lanes will never reach
  for (auto& block : blocks) {
    for (const Warp& warp : block->warps) divergent |= warp.arrived != 0;
  }
  report(first, divergent ? "divergence" : "deadlock", {}, {}, [&] {
    std::string text = divergent ? "a warp is divided, all 32 lanes must reach a collective together, in " : "deadlock in ";
    if (size() == 1) return text + describe(first.index) + ": " + who_waits(first);
    text += text_of("a cluster of ", size(), " blocks: ");
    for (auto& block : blocks) text += text_of(block->index, ": ", who_waits(*block), "; ");
    return text + "at the cluster's barrier is missing " + missing_warps(*this);
  });
}

}  // namespace cufa_host
