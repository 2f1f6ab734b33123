// Stores of blocks of a cluster to one another's shared memory. They land at once, or (late st.async and copies) when no warp has
// anything else to do.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

// An address in a cluster's shared memory: (rank + 1) << 24 | address in that block. An ordinary shared address is smaller, and
// means this block's own memory.
constexpr int kRankShift = 24;

u32 in_block(u32 address) { return address & ((1u << kRankShift) - 1); }

// The block that a store goes to; null, with a finding, if nothing must be stored. Counts the store; checked mode tests it.
Block* target_of(Thread& thread, u32 address, u32 bytes, Access kind, const char* what, Site site) {
  Block& block = *thread.block;
  u32 smem;
  Block* const target = block_of(thread, address, smem);
  if (!target) {
    report(thread, "out-of-range", site, what, " to an address of no block of the cluster");
    return nullptr;
  }
  const bool bulk = kind == Access::proxy_write;  // by the copy engine
  if (!(bulk ? bulk_bytes(thread, smem, bytes, site) : shared_bytes(thread, smem, bytes, what, site))) return nullptr;
  if (block.checked) {
    if (target != &block && !target->races.can_store(thread, site)) return nullptr;
    target->races.access(thread, smem, bytes, kind, site);
  }
  if (block.counted && bulk) block.counters.shared_write_bytes += bytes;
  if (block.counted && !bulk) count_shared(thread, AccessLog::shared_write, address, bytes, site);
  return target;
}

// A copy reads its source. Threads that learn of it from the mbarrier may then overwrite the source.
void read_source(const RemoteStore& store) {
  Block& source = *store.thread->block;
  if (!source.checked) return;
  if (!source.alive()) {
    report(source, "block-not-running", store.site, {}, [&] {
      return text_of(source.index, " has ended before it was read by the copy of ", *store.thread, " at ", store.site);
    });
  }
  source.races.end_sending(*store.thread, store.source, store.bytes, store.site);
}

void land(Block& block, const RemoteStore& store) {
  std::memcpy(block.at(store.smem), store.source ? store.thread->block->at(store.source) : store.value, store.bytes);
  Mbarrier& barrier = block.mbarriers.at(store.barrier);
  if (store.source) read_source(store);
  if (block.checked) {
    VectorClock& clock = store.source || store.thread->block == &block ? barrier.arrived : barrier.sent;
    block.races.publish_copy(*store.thread, store.smem, store.bytes, clock);
  }
  land_bytes(block, barrier, store.bytes);
}

// Sends a store to `address` of the block `target`, whose mbarrier at the cluster address `barrier` counts its bytes.
void send(Block& target, const RemoteStore& store, u32 address, u32 barrier, const char* what, Site site) {
  Thread& thread = *store.thread;
  const auto found = target.mbarriers.find(store.barrier);
  if (barrier >> kRankShift != address >> kRankShift || found == target.mbarriers.end()) {
    abandon(thread, "barrier", site, what, " to ", target.index, ", where no mbarrier was initialised at the address given");
  }
  check_announced(thread, target, found->second, store.barrier, site);
  if (thread.block->launch.late_copies) {
    target.remote_stores.push_back(store);
  } else {
    land(target, store);
  }
}

void store_cluster(u32 address, const void* value, u32 bytes, Site site) {
  Block* const target = target_of(current(), address, bytes, Access::write, "st.shared::cluster", site);
  if (target) std::memcpy(target->at(in_block(address)), value, bytes);
}

void store_async(u32 address, const void* value, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  Block* const target = target_of(thread, address, bytes, Access::async_write, "st.async", site);
  if (!target) return;
  RemoteStore store = {&thread, in_block(address), bytes, in_block(barrier), {}};
  std::memcpy(store.value, value, bytes);
  send(*target, store, address, barrier, "st.async", site);
}

}  // namespace

Block* block_of(Thread& thread, u32 address, u32& smem) {
  const u32 rank = address >> kRankShift;
  smem = in_block(address);
  if (rank > u32(thread.block->cluster.size())) return nullptr;
  return rank ? thread.block->cluster.blocks[rank - 1].get() : thread.block;
}

void check_announced(Thread& thread, Block& target, const Mbarrier& barrier, u32 smem, Site site) {
  Block& block = *thread.block;
  if (!block.checked || &target == &block || block.races.knows(thread, barrier)) return;
  report(block, "race", site, {}, [&] {
    return text_of("the mbarrier at shared offset ", offset_of(smem), " of ", target.index, " may not have been initialised for ",
                   thread, " at ", site, ": fence.mbarrier_init and a barrier of the cluster would tell");
  });
}

bool land_one_store(Block& block) {
  if (block.remote_stores.empty()) return false;
  land(block, take_next(block, block.remote_stores));
  return true;
}

}  // namespace cufa_host

u32 cluster_rank() { return current().block->rank; }
u32 cluster_address(u32 smem, u32 rank, Site site) {
  Thread& thread = current();
  const u32 size = thread.block->cluster.size();
  if (rank >= size) abandon(thread, "out-of-range", site, "block ", rank, " of a cluster of ", size);
  return smem + ((rank + 1) << kRankShift);
}
void st_cluster_vec2(u32 address, vec2 v, Site site) { store_cluster(address, &v, 8, site); }
void st_cluster_vec4(u32 address, vec4 v, Site site) { store_cluster(address, &v, 16, site); }
void st_async_vec2(u32 address, vec2 v, u32 barrier, Site site) { store_async(address, &v, 8, barrier, site); }
void st_async_vec4(u32 address, vec4 v, u32 barrier, Site site) { store_async(address, &v, 16, barrier, site); }
void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const char* const what = "cp.async.bulk.shared::cluster";
  bulk_bytes(thread, smem, bytes, site);
  Block* const target = target_of(thread, address, bytes, Access::proxy_write, what, site);
  if (!target) return;
  if (block.checked) block.races.begin_sending(thread, smem, bytes, site);
  ++block.counters.bulk_copies;
  if (block.counted) {
    block.counters.shared_read_bytes += bytes;
    block.counters.add_engine_wavefronts(2 * bytes / 128);  // read here, written there
  }
  send(*target, {&thread, in_block(address), bytes, in_block(barrier), {}, smem, site}, address, barrier, what, site);
}
