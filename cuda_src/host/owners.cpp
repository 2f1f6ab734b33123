#include "host/owners.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

namespace {
std::atomic<u64> launches{0};
}

Owners::Owners(const CufaLaunch& launch)
    : launch_(launch), launch_number_(++launches), owner_(launch.num_arrays) {
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

bool Owners::ordered(u32 me, u64 mark) const {
  const u32 other = u32(mark >> 32) - 1;
  return other == me || (!seen_[me].empty() && seen_[me][other] > u32(mark));
}

u64 Owners::with_adder(u64 owner, u64 mark) {
  thread_local struct {
    u64 launch, owner, mark, result;
  } last = {};  // neighbours nearly always have the same history
  if (last.launch == launch_number_ && last.owner == owner && last.mark == mark) return last.result;
  const std::lock_guard<std::mutex> lock(adding_);
  u64& result = next_adders_[{owner, mark}];
  if (!result) {
    std::vector<u64> adders;
    if (owner & kSums) adders = adders_[owner & ~kSums];
    // Only a block's latest addition counts: what is ordered after that is ordered after those before.
    const auto same_block = [&](u64 adder) { return adder >> 32 == mark >> 32; };
    adders.erase(std::remove_if(adders.begin(), adders.end(), same_block), adders.end());
    adders.push_back(mark);
    result = kSums | adders_.size();
    adders_.push_back(adders);
  }
  last = {launch_number_, owner, mark, result};
  return result;
}

bool Owners::ordered_after_sums(u32 me, u64 sums, u32& other) {
  const std::lock_guard<std::mutex> lock(adding_);
  for (const u64 adder : adders_[sums & ~kSums]) {
    if (ordered(me, adder)) continue;
    other = u32(adder >> 32) - 1;
    return false;
  }
  return true;
}

void Owners::access(Thread& thread, int index, const void* global, u32 bytes, Access kind, Site site) {
  const CufaArray& array = launch_.arrays[index];
  const u32 me = number(thread.block_index);
  const u64 mark = u64(me + 1) << 32 | (seen_[me].empty() ? 0 : seen_[me][me]);
  const u64 begin = reinterpret_cast<u64>(global) - reinterpret_cast<u64>(array.begin);
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    std::atomic<u64>& owner = owner_[index][i];
    u64 found = owner.load();
    if (kind == Access::atomic) {
      while (!owner.compare_exchange_weak(found, with_adder(found, mark))) {
      }
    } else if (kind != Access::read) {
      found = owner.exchange(mark);
    }
    u32 other = u32(found >> 32) - 1;
    if (found == 0) continue;
    if (found & kSums ? kind == Access::atomic || ordered_after_sums(me, found, other) : ordered(me, found)) continue;
    report(*thread.block, "race", site, {"other block", 0}, [&] {
      return "blocks " + std::to_string(other) + " and " + std::to_string(me) + " of one launch both touch " +
             global_place(launch_, global, bytes) + ": " + describe(thread) + " at " + describe(site);
    });
    return;
  }
}

void Owners::hand(Thread& thread, const u32* counter) {
  const u32 me = number(thread.block_index);
  std::vector<u32>&seen = seen_[me], &handed = handed_[counter];
  seen.resize(seen_.size());
  handed.resize(seen_.size());
  ++seen[me];
  for (u64 i = 0; i < seen.size(); ++i) handed[i] = std::max(seen[i], handed[i]);
  VectorClock& clock = thread.block->cluster.counters.try_emplace(counter, thread.block->cluster.clocks.size).first->second;
  thread.block->races.release(thread, clock);
}

void Owners::take(Thread& thread, const u32* counter) {
  const u32 me = number(thread.block_index);
  std::vector<u32>&seen = seen_[me], &handed = handed_[counter];
  seen.resize(seen_.size());
  handed.resize(seen_.size());
  for (u64 i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], handed[i]);
  const auto own = thread.block->cluster.counters.find(counter);
  if (own != thread.block->cluster.counters.end()) thread.block->races.acquire(thread, own->second);
}

u32 Owners::count_in(Thread& thread, u32* counter, u32 last) {
  const std::lock_guard<std::mutex> lock(counting_);
  take(thread, counter);
  hand(thread, counter);
  const u32 old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}

void Owners::release(Thread& thread, u32* counter, u32 value) {
  const std::lock_guard<std::mutex> lock(counting_);
  hand(thread, counter);
  *counter += value;
}

u32 Owners::acquire(Thread& thread, const u32* counter) {
  const std::lock_guard<std::mutex> lock(counting_);
  take(thread, counter);
  return *counter;
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
