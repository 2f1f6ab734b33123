// What blocks of a cluster store to one another's shared memory: at once, or (st.async) when it is issued or when every
// warp has nothing else to do, as copies do.
#include <cstring>

#include "host/cluster.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

// An address in a cluster's shared memory: (rank + 1) << 24 | address in that block. An ordinary shared address lies
// below, and means this block's own.
constexpr int kRankShift = 24;

u32 in_block(u32 address) { return address & ((1u << kRankShift) - 1); }

struct Target {
  Block* block;  // null: nothing must be stored there
  unsigned char* bytes;
};

// Counts the store, and in checked mode tests it.
Target find(Thread& thread, u32 address, u32 bytes, Access kind, const char* what, Site site) {
  Block& block = *thread.block;
  const u32 rank = address >> kRankShift;
  if (rank > u32(block.cluster.size())) {
    report(block, "out-of-range", site, {"", 0}, [&] {
      return std::string(what) + " to an address of no block of the cluster: " + describe(thread) + " at " +
             describe(site);
    });
    return {};
  }
  Block& target = rank ? *block.cluster.blocks[rank - 1] : block;
  const unsigned char* own = shared_bytes(thread, in_block(address), bytes, what, site);
  if (!own) return {};
  if (block.checked) {
    if (&target != &block && !target.races.can_store(thread, site)) return {};
    target.races.access(thread, in_block(address), bytes, kind, site);
  }
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    thread.warp->log.add(AccessLog::shared_write, site, thread.lane, address, bytes);
  }
  return {&target, target.shared + (own - block.shared)};
}

void land(Block& block, const RemoteStore& store) {
  std::memcpy(block.shared + (store.smem - kSharedBase), store.source ? store.source : store.value, store.bytes);
  Mbarrier& barrier = block.mbarriers.at(store.barrier);
  if (block.checked) {
    VectorClock& clock = store.thread->block == &block ? barrier.arrived : barrier.sent;
    block.races.publish_copy(*store.thread, store.smem, store.bytes, clock);
  }
  land_bytes(block, barrier, store.bytes);
}

// The mbarrier of the block `target` at an address of the cluster, which this thread must know to be initialised.
Mbarrier& find_barrier(Thread& thread, u32 barrier, Block& target, const char* what, Site site) {
  Block& block = *thread.block;
  const auto found = target.mbarriers.find(in_block(barrier));
  if (found == target.mbarriers.end()) {
    abandon(block, "barrier", site,
            std::string(what) + " to " + describe(target.index) +
                ", where no mbarrier was initialised at the address given: " + describe(thread) + " at " + describe(site));
  }
  if (block.checked && &target != &block) knows_barrier(thread, found->second, target, in_block(barrier), site);
  return found->second;
}

}  // namespace

bool knows_barrier(Thread& thread, const Mbarrier& barrier, Block& target, u32 address, Site site) {
  Block& block = *thread.block;
  if (block.races.knows(thread, barrier)) return true;
  report(block, "race", site, {"", 0}, [&] {
    return "the mbarrier at shared offset " + std::to_string(address - kSharedBase) + " of " + describe(target.index) +
           " may not have been initialised for " + describe(thread) + " at " + describe(site) +
           ": fence.mbarrier_init and a barrier of the cluster would tell";
  });
  return false;
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
  const Target target = find(current(), address, bytes, Access::write, "st.shared::cluster", site);
  if (target.block) std::memcpy(target.bytes, value, bytes);
}

void store_async(u32 address, const void* value, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const Target target = find(thread, address, bytes, Access::async_write, "st.async", site);
  if (!target.block) return;
  if (barrier >> kRankShift != address >> kRankShift) barrier = 0;
  find_barrier(thread, barrier, *target.block, "st.async", site);
  RemoteStore store = {&thread, in_block(address), bytes, in_block(barrier), {}};
  std::memcpy(store.value, value, bytes);
  if (block.launch.late_copies) {
    target.block->remote_stores.push_back(store);
  } else {
    land(*target.block, store);
  }
}

void arrive_in_cluster(u32 address, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const u32 rank = address >> kRankShift;
  if (rank > u32(block.cluster.size())) {
    abandon(block, "out-of-range", site,
            "mbarrier.arrive at an address of no block of the cluster: " + describe(thread) + " at " + describe(site));
  }
  Block& target = rank ? *block.cluster.blocks[rank - 1] : block;
  Mbarrier& barrier = find_barrier(thread, address, target, "mbarrier.arrive", site);
  if (block.checked) {
    if (&target != &block && !target.races.can_store(thread, site)) return;
    block.races.release(thread, &target == &block ? barrier.arrived : barrier.sent);
  }
  count_arrival(target, barrier, in_block(address), 0, thread, site);
}

void send_bytes(u32 address, u32 smem, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const unsigned char* source = shared_bytes(thread, smem, bytes, "cp.async.bulk", site);
  if (!source) return;
  if (block.checked) block.races.access(thread, smem, bytes, Access::proxy_read, site);
  const Target target = find(thread, address, bytes, Access::proxy_write, "cp.async.bulk", site);
  if (!target.block) return;
  if (barrier >> kRankShift != address >> kRankShift) barrier = 0;
  find_barrier(thread, barrier, *target.block, "cp.async.bulk", site);
  const RemoteStore store = {&thread, in_block(address), bytes, in_block(barrier), {}, source};
  if (block.launch.late_copies) {
    target.block->remote_stores.push_back(store);
  } else {
    land(*target.block, store);
  }
}

bool land_one_store(Block& block) {
  if (block.remote_stores.empty()) return false;
  const std::size_t n = block.remote_stores.size();
  const std::size_t i = block.launch.schedule == kRandom ? random_number(block) % n : 0;
  const RemoteStore store = block.remote_stores[i];
  block.remote_stores.erase(block.remote_stores.begin() + i);
  land(block, store);
  return true;
}

}  // namespace cufa_host
