#include "host/owners.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

Owners::Owners(const CufaLaunch& launch) : launch_(launch), owner_(launch.num_arrays) {
  if (launch.mode != kChecked) return;
  for (int i = 0; i < launch.num_arrays; ++i) {
    const CufaArray& array = launch.arrays[i];
    if (array.writable) owner_[i].reset(new std::atomic<u64>[array.bytes / array.granule + 1]());
  }
  seen_.resize(u64(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
}

u32 Owners::number(Index3 b) const {
  return b.x + launch_.grid[0] * (b.y + launch_.grid[1] * b.z);
}

void Owners::access(Thread& thread, int index, const void* global, u32 bytes, Access kind, Site site) {
  if (kind == Access::atomic) return;
  const CufaArray& array = launch_.arrays[index];
  const u32 me = number(thread.block_index);
  const std::vector<u32>& seen = seen_[me];
  const u64 mark = u64(me + 1) << 32 | (seen.empty() ? 0 : seen[me]);
  const u64 begin = reinterpret_cast<u64>(global) - reinterpret_cast<u64>(array.begin);
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    std::atomic<u64>& owner = owner_[index][i];
    const u64 found = kind == Access::read ? owner.load() : owner.exchange(mark);
    const u32 other = u32(found >> 32), time = u32(found);
    if (other == 0 || other == me + 1 || (!seen.empty() && seen[other - 1] > time)) continue;
    report(*thread.block, "race", site, {"other block", 0}, [&] {
      return "blocks " + std::to_string(other - 1) + " and " + std::to_string(me) + " of one launch both touch " +
             global_place(launch_, global, bytes) + ": " + describe(thread) + " at " + describe(site);
    });
    return;
  }
}

u32 Owners::count_in(Thread& thread, u32* counter, u32 last) {
  const std::lock_guard<std::mutex> lock(counting_);
  const u32 me = number(thread.block_index);
  std::vector<u32>&seen = seen_[me], &handed = handed_[counter];
  seen.resize(seen_.size());
  handed.resize(seen_.size());
  ++seen[me];
  for (u64 i = 0; i < seen.size(); ++i) seen[i] = handed[i] = std::max(seen[i], handed[i]);
  const u32 old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}

void Owners::meet(const Cluster& cluster) {
  if (cluster.size() == 1) return;
  std::vector<u32> all(seen_.size(), 0);
  for (const auto& block : cluster.blocks) {
    const u32 me = number(block->index);
    std::vector<u32>& seen = seen_[me];
    seen.resize(seen_.size());
    ++seen[me];
    for (u64 i = 0; i < all.size(); ++i) all[i] = std::max(all[i], seen[i]);
  }
  for (const auto& block : cluster.blocks) seen_[number(block->index)] = all;
}

}  // namespace cufa_host
