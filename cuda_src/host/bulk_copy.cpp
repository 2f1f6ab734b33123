// TMA: boxes of a tensor into swizzled shared memory, where a copy lands at once ("early") or when all warps wait
// ("late"); and out of it, which is read at once or when the store is waited for.
#include <cstring>

#include "host/backward_hopper_host.h"
#include "host/backward_host.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

constexpr u32 kUnit = 16;          // bytes that the swizzle moves as one
constexpr u32 kSwizzleSpan = 128;  // bytes of a row of the box

u32 box_bytes(const TensorMap& map) { 
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.item_bytes;
}

// f(shared address, global address or null where the box hangs over the tensor, bytes) for every unit.
template <typename F>
void for_each_unit(const Box& box, F f) {
  const TensorMap& map = box.map;
  const u32 row_bytes = map.box[0] * map.item_bytes, rows = box_bytes(map) / row_bytes;
  for (u32 row = 0; row < rows; ++row) {
    i64 at[4] = {box.first[0]};
    for (u32 axis = 1, rest = row; axis < 4; rest /= map.box[axis], ++axis) {
      at[axis] = i64(box.first[axis]) + rest % map.box[axis];
    }
    bool inside = true;
    const unsigned char* source = map.address;
    for (int axis = 1; axis < 4; ++axis) {
      inside = inside && at[axis] >= 0 && at[axis] < i64(map.sizes[axis]);
      source += at[axis] * i64(map.strides[axis]);
    }
    for (u32 byte = 0; byte < row_bytes; byte += kUnit) {
      const i64 column = at[0] + byte / map.item_bytes;
      const bool valid = inside && column >= 0 && column < i64(map.sizes[0]);
      const u32 left = valid ? u32(i64(map.sizes[0]) - column) * map.item_bytes : 0;  // TMA clips by elements
      u32 target = box.smem + row * row_bytes + byte;
      if (box.swizzled) target ^= target / kSwizzleSpan % 8 * kUnit;
      f(target, valid ? source + column * map.item_bytes : nullptr, left < kUnit ? left : kUnit);
    }
  }
}

}  // namespace

void land(Block& block, const BulkCopy& copy) {
  for_each_unit(copy.box, [&](u32 target, const unsigned char* source, u32 bytes) {
    unsigned char* to = block.shared + (target - kSharedBase);
    std::memset(to, 0, kUnit);
    if (source) std::memcpy(to, source, bytes);
  });
  Mbarrier& barrier = block.mbarriers.at(copy.barrier);
  const u32 bytes = box_bytes(copy.box.map);
  if (block.checked) block.races.publish_copy(*copy.thread, copy.box.smem, bytes, barrier.arrived);
  land_bytes(block, barrier, bytes);
}

// `rule` is what the copy engine demands of the bytes beside their place in the block.
static void check_place(Thread& thread, u32 smem, u32 bytes, bool aligned, const char* rule, Site site) {
  Block& block = *thread.block;
  if (!aligned) {
    abandon(block, "misaligned", site,
            rule + (": shared offset " + std::to_string(smem - kSharedBase)) + ", " + describe(thread) + " at " +
                describe(site));
  }
  if (smem - kSharedBase > block.launch.shared_bytes || block.launch.shared_bytes - (smem - kSharedBase) < bytes) {
    abandon(block, "out-of-range", site,
            "TMA box of " + std::to_string(bytes) + " bytes at shared offset " + std::to_string(smem - kSharedBase) +
                ", outside the block's " + std::to_string(block.launch.shared_bytes) + " bytes: " + describe(thread) +
                " at " + describe(site));
  }
}

unsigned char* bulk_bytes(Thread& thread, u32 smem, u32 bytes, Site site) {
  check_place(thread, smem, bytes, smem % kUnit == 0 && bytes % kUnit == 0,
              "a bulk copy takes multiples of 16 bytes at a multiple of 16", site);
  return thread.block->shared + (smem - kSharedBase);
}

// What the copy engine demands of a box in shared memory.
static void check_box(Thread& thread, const Box& box, Site site) {
  const u32 bytes = box_bytes(box.map);
  if (!box.swizzled) return void(bulk_bytes(thread, box.smem, bytes, site));
  check_place(thread, box.smem, bytes,
              box.smem % kSwizzleSpan == 0 && box.map.box[0] * box.map.item_bytes == kSwizzleSpan,
              "a TMA box with 128-byte swizzle takes rows of 128 bytes at a multiple of 128", site);
}

// Bytes in a row: a tensor of one axis.
static Box linear(const void* global, u32 smem, u32 bytes) {
  const u32 words = bytes / 4;
  return {{static_cast<const unsigned char*>(global), 4, {words, 1, 1, 1}, {4}, {words, 1, 1, 1}}, smem, {}, false};
}

static void load(const Box& box, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkCopy copy = {box, &thread, barrier};
  const u32 bytes = box_bytes(box.map);
  check_box(thread, box, site);
  const auto counts = block.mbarriers.find(barrier);
  if (counts == block.mbarriers.end()) {
    abandon(block, "barrier", site,
            "no mbarrier was initialised at shared offset " + std::to_string(barrier - kSharedBase) + ": " +
                describe(thread) + " at " + describe(site));
  }
  if (block.checked) {
    block.races.check_initialised(thread, barrier, counts->second, site);
    block.races.access(thread, box.smem, bytes, Access::proxy_write, site);
    for_each_unit(copy.box, [&](u32 target, const unsigned char* source, u32 valid) {
      bool raced = false;
      if (source) check_global(thread, source, valid, Access::proxy_read, "TMA", site, &raced);
      if (raced) block.races.taint(target, source, site);
    });
  }
  ++block.counters.bulk_copies;
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    block.counters.add_engine_wavefronts(bytes / 128);
    for_each_unit(copy.box, [&](u32, const unsigned char* source, u32 valid) {
      if (source) block.counters.global_read_bytes += valid;
    });
  }
  if (block.launch.late_copies) {
    block.bulk_copies.push_back(copy);
  } else {
    land(block, copy);
  }
}

void load_box(u32 smem, const TensorMap* map, u32 barrier, const int (&first)[4], Site site) {
  load({*map, smem, {first[0], first[1], first[2], first[3]}}, barrier, site);
}
void load_linear(u32 smem, const void* global, u32 bytes, u32 barrier, Site site) {
  load(linear(global, smem, bytes), barrier, site);
}

// From shared memory, or what was read of it, to the tensor.
static void move_out(Block& block, const BulkStore& store) {
  for_each_unit(store.box, [&](u32 source, const unsigned char* target, u32 bytes) {
    if (!target) return;
    const unsigned char* from =
        store.sent.empty() ? block.shared + (source - kSharedBase) : store.sent.data() + (source - store.box.smem);
    unsigned char* to = const_cast<unsigned char*>(target);
    if (!store.adds) return void(std::memcpy(to, from, bytes));
    add_atomically(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), bytes / sizeof(float));
  });
}

static void send(const Box& box, bool adds, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkStore store = {box, site, adds};
  check_box(thread, box, site);
  bool inside = true;
  if (block.checked || adds) {
    if (block.checked) block.races.begin_sending(thread, box.smem, box_bytes(box.map), site);
    for_each_unit(box, [&](u32, const unsigned char* target, u32 bytes) {
      if (target) inside &= check_global(thread, target, bytes, adds ? Access::async_sum : Access::proxy_write, "TMA", site);
    });
  }
  ++block.counters.bulk_copies;
  if (adds) block.counters.reductions += box_bytes(box.map) / sizeof(float);
  if (block.counted) {
    block.counters.shared_read_bytes += box_bytes(box.map);
    block.counters.add_engine_wavefronts(box_bytes(box.map) / 128);
    for_each_unit(box, [&](u32, const unsigned char* target, u32 bytes) {
      if (target) block.counters.global_write_bytes += bytes;
    });
  }
  if (!inside) return;
  if (!block.launch.late_copies) move_out(block, store);
  if (block.launch.late_copies || block.checked) thread.stores.push(store);
  if (adds && block.checked) thread.additions.push_back(store);
}

void store_box(const TensorMap* map, u32 smem, const int (&first)[4], Site site) {
  send({*map, smem, {first[0], first[1], first[2], first[3]}}, false, site);
}
void add_linear(float* global, u32 smem, u32 bytes, Site site) { send(linear(global, smem, bytes), true, site); }

void commit_stores() {
  Thread& thread = current();
  if (thread.block->launch.late_copies || thread.block->checked) thread.stores.commit();
}

void end_additions(Thread& thread) {
  for (const BulkStore& store : thread.additions_read) move_out(*thread.block, store);
  thread.additions_read.clear();
}

// What is added is in memory no earlier than when the next ones have been read, or when somebody waits for it.
void await_stores_read() {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!thread.stores.in_flight().empty()) end_additions(thread);
  thread.stores.wait(0, [&](const BulkStore& store) {
    if (block.launch.late_copies && store.adds) {
      const unsigned char* const from = block.shared + (store.box.smem - kSharedBase);
      thread.additions_read.push_back(store);
      thread.additions_read.back().sent.assign(from, from + box_bytes(store.box.map));
    } else if (block.launch.late_copies) {
      move_out(block, store);
    }
    if (block.checked) block.races.end_sending(thread, store.box.smem, box_bytes(store.box.map), store.site);
  });
}

void await_stores() {
  await_stores_read();
  Thread& thread = current();
  end_additions(thread);
  for (const BulkStore& store : thread.additions) {  // done now: others may know
    for_each_unit(store.box, [&](u32, const unsigned char* target, u32 bytes) {
      check_global(thread, target, bytes, Access::sum, "TMA", store.site);
    });
  }
  thread.additions.clear();
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
