// The blocks of a cluster in turn, and what they store to one another's shared memory.
#include "host/cluster.h"

#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

// An address in a cluster's shared memory: (rank + 1) << 24 | address in that block. An ordinary shared address lies
// below, and means this block's own.
constexpr int kRankShift = 24;

// Somewhere in the cluster a copy in flight lands; false when there is none.
bool land_one(Cluster& cluster) {
  for (auto& block : cluster.blocks) {
    if (land_one(*block)) return true;
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

u32 cluster_block_rank() { return current().block->rank; }

u32 address_in_cluster(u32 smem, u32 rank, Site site) {
  Thread& thread = current();
  const u32 size = thread.block->cluster.size();
  if (rank >= size) {
    abandon(*thread.block, "out-of-range", site,
            "block " + std::to_string(rank) + " of a cluster of " + std::to_string(size) + ": " + describe(thread) +
                " at " + describe(site));
  }
  return smem + ((rank + 1) << kRankShift);
}

void store_cluster(u32 address, const void* value, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const u32 smem = address & ((1u << kRankShift) - 1), rank = address >> kRankShift;
  if (rank > u32(block.cluster.size())) {
    return report(block, "out-of-range", site, {"", 0}, [&] {
      return "st.shared::cluster to an address of no block of the cluster: " + describe(thread) + " at " +
             describe(site);
    });
  }
  Block& target = rank ? *block.cluster.blocks[rank - 1] : block;
  const unsigned char* own = shared_bytes(thread, smem, bytes, "st.shared::cluster", site);
  if (!own) return;
  if (block.checked && &target != &block && !target.races.can_store(thread, site)) return;
  std::memcpy(target.shared + (own - block.shared), value, bytes);
  if (block.checked) target.races.access(thread, smem, bytes, Access::write, site);
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    thread.warp->log.add(AccessLog::shared_write, site, thread.lane, address, bytes);
  }
}

}  // namespace cufa_host
