// TMA: boxes of a tensor into swizzled shared memory, where a copy lands at once ("early") or when all warps wait
// ("late"); and out of it, always at once.
#include <cstring>

#include "host/hopper_host.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

constexpr u32 kUnit = 16;          // bytes that the swizzle moves as one
constexpr u32 kSwizzleSpan = 128;  // bytes of a row of the box

u32 box_bytes(const TensorMap& map) { 
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4] * map.item_bytes;
}

// f(shared address, global address or null where the box hangs over the tensor, bytes) for every unit.
template <typename F>
void for_each_unit(const BulkCopy& copy, F f) {
  const TensorMap& map = copy.map;
  const u32 row_bytes = map.box[0] * map.item_bytes, rows = box_bytes(map) / row_bytes;
  for (u32 row = 0; row < rows; ++row) {
    i64 at[5] = {copy.first[0]};
    for (u32 axis = 1, rest = row; axis < 5; rest /= map.box[axis], ++axis) {
      at[axis] = i64(copy.first[axis]) + rest % map.box[axis];
    }
    bool inside = true;
    const unsigned char* source = map.address;
    for (int axis = 1; axis < 5; ++axis) {
      inside = inside && at[axis] >= 0 && at[axis] < i64(map.sizes[axis]);
      source += at[axis] * i64(map.strides[axis]);
    }
    for (u32 byte = 0; byte < row_bytes; byte += kUnit) {
      const i64 column = at[0] + byte / map.item_bytes;
      const bool valid = inside && column >= 0 && column < i64(map.sizes[0]);
      const u32 left = valid ? u32(i64(map.sizes[0]) - column) * map.item_bytes : 0;  // TMA clips by elements
      u32 target = copy.smem + row * row_bytes + byte;
      target ^= target / kSwizzleSpan % 8 * kUnit;
      f(target, valid ? source + column * map.item_bytes : nullptr, left < kUnit ? left : kUnit);
    }
  }
}

}  // namespace

void land(Block& block, const BulkCopy& copy) {
  for_each_unit(copy, [&](u32 target, const unsigned char* source, u32 bytes) {
    unsigned char* to = block.shared + (target - kSharedBase);
    std::memset(to, 0, kUnit);
    if (source) std::memcpy(to, source, bytes);
  });
  Mbarrier& barrier = block.mbarriers.at(copy.barrier);
  const u32 bytes = box_bytes(copy.map);
  if (block.checked) block.races.publish_copy(*copy.thread, copy.smem, bytes, barrier.arrived);
  land_bytes(block, barrier, bytes);
}

// What TMA demands of a box in shared memory.
static void check_box(Block& block, Thread& thread, const TensorMap* map, u32 smem, Site site) {
  const u32 bytes = box_bytes(*map);
  if (smem % kSwizzleSpan || map->box[0] * map->item_bytes != kSwizzleSpan) {
    abandon(block, "misaligned", site,
            "a TMA box with 128-byte swizzle takes rows of 128 bytes at a multiple of 128: shared offset " +
                std::to_string(smem - kSharedBase) + ", " + describe(thread) + " at " + describe(site));
  }
  if (smem - kSharedBase > block.launch.shared_bytes || block.launch.shared_bytes - (smem - kSharedBase) < bytes) {
    abandon(block, "out-of-range", site,
            "TMA box of " + std::to_string(bytes) + " bytes at shared offset " + std::to_string(smem - kSharedBase) +
                ", outside the block's " + std::to_string(block.launch.shared_bytes) + " bytes: " + describe(thread) +
                " at " + describe(site));
  }
}

void load_box(u32 smem, const TensorMap* map, u32 barrier, const int (&first)[5], Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkCopy copy = {&thread, *map, smem, barrier, {first[0], first[1], first[2], first[3], first[4]}};
  const u32 bytes = box_bytes(*map);
  check_box(block, thread, map, smem, site);
  if (!block.mbarriers.count(barrier)) {
    abandon(block, "barrier", site,
            "no mbarrier was initialised at shared offset " + std::to_string(barrier - kSharedBase) + ": " +
                describe(thread) + " at " + describe(site));
  }
  if (block.checked) {
    block.races.access(thread, smem, bytes, Access::proxy_write, site);
    for_each_unit(copy, [&](u32, const unsigned char* source, u32 valid) {
      if (source) check_global(thread, source, valid, Access::read, "TMA", site);
    });
  }
  ++block.counters.bulk_copies;
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    block.counters.shared_wavefronts += bytes / 128;
    for_each_unit(copy, [&](u32, const unsigned char* source, u32 valid) {
      if (source) block.counters.global_read_bytes += valid;
    });
  }
  if (block.launch.late_copies) {
    block.bulk_copies.push_back(copy);
  } else {
    land(block, copy);
  }
}

void store_box(const TensorMap* map, u32 smem, const int (&first)[4], Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkCopy copy = {&thread, *map, smem, 0, {first[0], first[1], first[2], first[3]}};
  check_box(block, thread, map, smem, site);
  if (block.checked) block.races.access(thread, smem, box_bytes(*map), Access::proxy_read, site);
  for_each_unit(copy, [&](u32 source, const unsigned char* target, u32 bytes) {
    if (!target) return;
    if (block.checked && !check_global(thread, target, bytes, Access::write, "TMA", site)) return;
    std::memcpy(const_cast<unsigned char*>(target), block.shared + (source - kSharedBase), bytes);
    if (block.counted) block.counters.global_write_bytes += bytes;
  });
  ++block.counters.bulk_copies;
  if (block.counted) block.counters.shared_read_bytes += box_bytes(*map);
}

void fence_proxies() {
  Thread& thread = current();
  if (thread.block->checked) thread.block->races.fence_proxies(thread);
}

bool land_one(Block& block) {
  if (block.bulk_copies.empty()) return false;
  const std::size_t i = block.launch.schedule == kRandom ? random_number(block) % block.bulk_copies.size() : 0;
  const BulkCopy copy = block.bulk_copies[i];
  block.bulk_copies.erase(block.bulk_copies.begin() + i);
  land(block, copy);
  return true;
}

}  // namespace cufa_host
