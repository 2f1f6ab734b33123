// What blocks of a cluster store to one another's shared memory: at once, or (st.async, and copies of it) when it is issued or
// when every warp has nothing else to do.
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
  u32 smem;
  Block* const target = block_of(thread, address, smem);
  if (!target) {
    report(block, "out-of-range", site, {"", 0}, [&] {
      return std::string(what) + " to an address of no block of the cluster: " + describe(thread) + " at " +
             describe(site);
    });
    return {};
  }
  const bool bulk = kind == Access::proxy_write;  // by the copy engine
  const unsigned char* own = bulk ? bulk_bytes(thread, smem, bytes, site) : shared_bytes(thread, smem, bytes, what, site);
  if (!own) return {};
  if (block.checked) {
    if (target != &block && !target->races.can_store(thread, site)) return {};
    target->races.access(thread, smem, bytes, kind, site);
  }
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    if (!bulk) thread.warp->log.add(AccessLog::shared_write, site, thread.lane, address, bytes);
  }
  return {target, target->shared + (own - block.shared)};
}

// A copy reads its source now. That is over for those who learn from the mbarrier that it is.
void read_source(const RemoteStore& store) {
  Block& source = *store.thread->block;
  if (!source.checked) return;
  if (!source.alive()) {
    report(source, "block-not-running", store.site, {"", 0}, [&] {
      return describe(source.index) + " has ended before it was read by the copy of " + describe(*store.thread) + " at " +
             describe(store.site);
    });
  }
  source.races.end_sending(*store.thread, store.source, store.bytes, store.site);
}

void land(Block& block, const RemoteStore& store) {
  const unsigned char* const from = store.source ? store.thread->block->shared + (store.source - kSharedBase) : store.value;
  std::memcpy(block.shared + (store.smem - kSharedBase), from, store.bytes);
  Mbarrier& barrier = block.mbarriers.at(store.barrier);
  if (store.source) read_source(store);
  if (block.checked) {
    VectorClock& clock = store.source || store.thread->block == &block ? barrier.arrived : barrier.sent;
    block.races.publish_copy(*store.thread, store.smem, store.bytes, clock);
  }
  land_bytes(block, barrier, store.bytes);
}

}  // namespace

Block* block_of(Thread& thread, u32 address, u32& smem) {
  const u32 rank = address >> kRankShift;
  smem = in_block(address);
  if (rank > u32(thread.block->cluster.size())) return nullptr;
  return rank ? thread.block->cluster.blocks[rank - 1].get() : thread.block;
}

// Another block's mbarrier must be known to be initialised.
void check_told(Thread& thread, Block& target, const Mbarrier& barrier, u32 smem, Site site) {
  Block& block = *thread.block;
  if (!block.checked || &target == &block || block.races.knows(thread, barrier)) return;
  report(block, "race", site, {"", 0}, [&] {
    return "the mbarrier at shared offset " + std::to_string(smem - kSharedBase) + " of " + describe(target.index) +
           " may not have been initialised for " + describe(thread) + " at " + describe(site) +
           ": fence.mbarrier_init and a barrier of the cluster would tell";
  });
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

// Checks the mbarrier that what `thread` sends to `block` counts towards, and sends it.
static void send(Thread& thread, Block& target, const RemoteStore& store, u32 to, u32 barrier, const char* what, Site site) {
  Block& block = *thread.block;
  const auto found = target.mbarriers.find(store.barrier);
  if (barrier >> kRankShift != to >> kRankShift || found == target.mbarriers.end()) {
    abandon(block, "barrier", site,
            std::string(what) + " to " + describe(target.index) +
                ", where no mbarrier was initialised at the address given: " + describe(thread) + " at " + describe(site));
  }
  check_told(thread, target, found->second, store.barrier, site);
  if (block.launch.late_copies) {
    target.remote_stores.push_back(store);
  } else {
    land(target, store);
  }
}

void store_async(u32 address, const void* value, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  const Target target = find(thread, address, bytes, Access::async_write, "st.async", site);
  if (!target.block) return;
  RemoteStore store = {&thread, in_block(address), bytes, in_block(barrier), {}};
  std::memcpy(store.value, value, bytes);
  send(thread, *target.block, store, address, barrier, "st.async", site);
}

void copy_in_cluster(u32 address, u32 smem, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const char* const what = "cp.async.bulk.shared::cluster";
  bulk_bytes(thread, smem, bytes, site);
  const Target target = find(thread, address, bytes, Access::proxy_write, what, site);
  if (!target.block) return;
  if (block.checked) block.races.begin_sending(thread, smem, bytes, site);
  ++block.counters.bulk_copies;
  if (block.counted) {
    block.counters.shared_read_bytes += bytes;
    block.counters.add_engine_wavefronts(2 * bytes / 128);  // read here, written there
  }
  send(thread, *target.block, {&thread, in_block(address), bytes, in_block(barrier), {}, smem, site}, address, barrier, what, site);
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
