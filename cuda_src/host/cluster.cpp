// The blocks of a cluster in turn.
#include "host/cluster.h"

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

void report_stuck(Cluster& cluster) {
  Block& first = *cluster.blocks.front();
  bool divergent = false;  // lanes at a collective that the others will never reach
  for (auto& block : cluster.blocks) {
    for (const Warp& warp : block->warps) divergent |= warp.arrived != 0;
  }
  report(first, divergent ? "divergence" : "deadlock", {"", 0}, {"", 0}, [&] {
    std::string text = divergent ? "a warp is divided, all 32 lanes must reach a collective together, in "
                                 : "deadlock in ";
    if (cluster.size() == 1) return text + describe(first.index) + ": " + who_waits(first);
    text += "a cluster of " + std::to_string(cluster.size()) + " blocks: ";
    for (auto& block : cluster.blocks) text += describe(block->index) + ": " + who_waits(*block) + "; ";
    return text + cluster.who_is_missing();
  });
}

}  // namespace

Cluster::Cluster(const CufaLaunch& l, Findings& f, Owners& o, int w) : launch(l), findings(f), owners(o), worker(w) {
  for (u32 rank = 0; rank < launch.cluster; ++rank) blocks.emplace_back(new Block(*this, rank));
}

Cluster::~Cluster() = default;

bool Cluster::run(u32 first) {
  const bool checked = launch.mode == kChecked;
  if (checked) clocks.reset(size() * launch.num_threads);
  reset_barrier();
  counters.clear();
  for (auto& block : blocks) block->start(first + block->rank);
  for (bool alive = true; alive;) {
    bool progress = false;
    for (int i = 0; i < size(); ++i) {
      int rank = i;
      if (launch.schedule == kDescending) rank = size() - 1 - i;
      if (launch.schedule == kRandom && size() > 1) rank = random_number(*blocks[0]) % size();
      Block& block = *blocks[rank];
      progress |= block.sweep();
      if (block.failed) return false;
    }
    alive = false;
    for (auto& block : blocks) {
      alive |= block->alive();
      progress |= block->ready();
    }
    if (alive && !progress && !land_one(*this)) {
      report_stuck(*this);
      return false;
    }
  }
  for (auto& block : blocks) {
    for (Warp& warp : block->warps) {
      if (block->counted) warp.log.flush(block->counters);
    }
  }
  return true;
}

}  // namespace cufa_host
