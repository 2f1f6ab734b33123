// The blocks of a cluster in turn.
#include "host/cluster.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {
namespace {

// Somewhere in the cluster a copy in flight lands; false when there is none.
bool land_one(Cluster& cluster) {
  for (auto& block : cluster.blocks) {
    if (land_one(*block) || land_one_store(*block)) return true;
  }
  return false;
}

}  // namespace

Cluster::Cluster(const CufaLaunch& l, Findings& f, Owners& o, int w) : launch(l), findings(f), owners(o), worker(w) {
  for (u32 rank = 0; rank < launch.cluster; ++rank) blocks.emplace_back(new Block(*this, rank));
}

Cluster::~Cluster() = default;

void Cluster::start(u32 first) {
  if (launch.mode == kChecked) clocks.reset(size() * launch.num_threads);
  reset_barrier();
  counters.clear();
  for (auto& block : blocks) block->start(first + block->rank);
}

Cluster::State Cluster::run() {
  for (;;) {
    bool progress = false;
    for (int i = 0; i < size(); ++i) {
      int rank = i;
      if (launch.schedule == kDescending) rank = size() - 1 - i;
      if (launch.schedule == kRandom && size() > 1) rank = random_number(*blocks[0]) % size();
      Block& block = *blocks[rank];
      progress |= block.sweep();
      if (block.failed) return State::failed;
    }
    bool alive = false, polling = false;
    for (auto& block : blocks) {
      alive |= block->alive();
      progress |= block->ready();
      polling |= !block->polling.empty();
    }
    if (!alive) break;
    if (progress || land_one(*this) || wake()) continue;
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

void Cluster::report_stuck() {
  Block& first = *blocks.front();
  bool divergent = false;  // lanes at a collective that the others will never reach
  for (auto& block : blocks) {
    for (const Warp& warp : block->warps) divergent |= warp.arrived != 0;
  }
  report(first, divergent ? "divergence" : "deadlock", {"", 0}, {"", 0}, [&] {
    std::string text = divergent ? "a warp is divided, all 32 lanes must reach a collective together, in "
                                 : "deadlock in ";
    if (size() == 1) return text + describe(first.index) + ": " + who_waits(first);
    text += "a cluster of " + std::to_string(size()) + " blocks: ";
    for (auto& block : blocks) text += describe(block->index) + ": " + who_waits(*block) + "; ";
    return text + who_is_missing();
  });
}

}  // namespace cufa_host
