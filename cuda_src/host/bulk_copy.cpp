// The copy engine (TMA) copies boxes of a tensor to and from swizzled shared memory. Loads land at once ("early") or when all
// warps wait ("late"); stores read shared memory at once, or when they are waited for.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

constexpr u32 kUnit = 16;          // bytes that the swizzle moves as one
constexpr u32 kSwizzleSpan = 128;  // bytes of a row of the box

// f(shared address, global address or null if outside of the tensor, bytes) for every unit.
template <typename F>
void for_each_unit(const Box& box, F f) {
  const TensorMap& map = box.map;
  const u32 row_bytes = map.box[0] * map.item_bytes, rows = box.bytes() / row_bytes;
  for (u32 row = 0; row < rows; ++row) {
    bool inside = true;
    const unsigned char* source = map.address;
    for (u32 axis = 1, rest = row; axis < 4; rest /= map.box[axis], ++axis) {
      const i64 at = i64(box.first[axis]) + rest % map.box[axis];
      inside = inside && at >= 0 && at < i64(map.sizes[axis]);
      source += at * i64(map.strides[axis]);
    }
    for (u32 byte = 0; byte < row_bytes; byte += kUnit) {
      const i64 column = i64(box.first[0]) + byte / map.item_bytes;
      const bool valid = inside && column >= 0 && column < i64(map.sizes[0]);
      const u32 left = valid ? u32(i64(map.sizes[0]) - column) * map.item_bytes : 0;  // TMA clips by elements
      u32 target = box.smem + row * row_bytes + byte;
      if (box.swizzled) target ^= target / kSwizzleSpan % 8 * kUnit;
      f(target, valid ? source + column * map.item_bytes : nullptr, left < kUnit ? left : kUnit);
    }
  }
}

void land(Block& block, const BulkCopy& copy) {
  for_each_unit(copy.box, [&](u32 target, const unsigned char* source, u32 bytes) {
    std::memset(block.at(target), 0, kUnit);
    if (source) std::memcpy(block.at(target), source, bytes);
  });
  Mbarrier& barrier = block.mbarriers.at(copy.barrier);
  if (block.checked) block.races.publish_copy(*copy.thread, copy.box.smem, copy.box.bytes(), barrier.arrived);
  land_bytes(block, barrier, copy.box.bytes());
}

// `rule` is the copy engine's requirement beside the bounds of shared memory.
void check_place(Thread& thread, u32 smem, u32 bytes, bool aligned, const char* rule, Site site) {
  const u32 offset = offset_of(smem), size = thread.block->launch.shared_bytes;
  if (!aligned) abandon(thread, "misaligned", site, rule, ": shared offset ", offset);
  if (offset > size || size - offset < bytes) {
    abandon(thread, "out-of-range", site, "TMA box of ", bytes, " bytes at shared offset ", offset, ", outside the block's ",
            size, " bytes");
  }
}

void check_box(Thread& thread, const Box& box, Site site) {
  if (!box.swizzled) return void(bulk_bytes(thread, box.smem, box.bytes(), site));
  check_place(thread, box.smem, box.bytes(),
              box.smem % kSwizzleSpan == 0 && box.map.box[0] * box.map.item_bytes == kSwizzleSpan,
              "a TMA box with 128-byte swizzle takes rows of 128 bytes at a multiple of 128", site);
}

// Consecutive bytes: a box of a tensor of one axis.
Box linear(const void* global, u32 smem, u32 bytes) {
  const u32 words = bytes / 4;
  return {{static_cast<const unsigned char*>(global), 4, {words, 1, 1, 1}, {4}, {words, 1, 1, 1}}, smem, {}, false};
}

void load(const Box& box, u32 barrier, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkCopy copy = {box, &thread, barrier};
  check_box(thread, box, site);
  const Mbarrier& counts = mbarrier_at(thread, barrier, site);
  if (block.checked) {
    block.races.check_initialised(thread, barrier, counts, site);
    block.races.access(thread, box.smem, box.bytes(), Access::proxy_write, site);
    for_each_unit(box, [&](u32 target, const unsigned char* source, u32 valid) {
      bool raced = false;
      if (source) check_global(thread, source, valid, Access::proxy_read, "TMA", site, &raced);
      if (raced) block.races.taint(target, source, site);
    });
  }
  ++block.counters.bulk_copies;
  if (block.counted) {
    block.counters.shared_write_bytes += box.bytes();
    block.counters.add_engine_wavefronts(box.bytes() / 128);
    for_each_unit(box, [&](u32, const unsigned char* source, u32 valid) {
      if (source) block.counters.global_read_bytes += valid;
    });
  }
  if (block.launch.late_copies) {
    block.bulk_copies.push_back(copy);
  } else {
    land(block, copy);
  }
}

// From shared memory, or from the bytes that were read of it, to the tensor.
void move_out(Block& block, const BulkStore& store) {
  for_each_unit(store.box, [&](u32 source, const unsigned char* target, u32 bytes) {
    if (!target) return;
    const unsigned char* from = store.sent.empty() ? block.at(source) : store.sent.data() + (source - store.box.smem);
    unsigned char* to = const_cast<unsigned char*>(target);
    if (!store.adds) return void(std::memcpy(to, from, bytes));
    add_atomically(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), bytes / sizeof(float));
  });
}

void send(const Box& box, bool adds, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const BulkStore store = {box, site, adds};
  check_box(thread, box, site);
  bool inside = true;
  if (block.checked || adds) {
    if (block.checked) block.races.begin_sending(thread, box.smem, box.bytes(), site);
    for_each_unit(box, [&](u32, const unsigned char* target, u32 bytes) {
      if (target) inside &= check_global(thread, target, bytes, adds ? Access::async_sum : Access::proxy_write, "TMA", site);
    });
  }
  ++block.counters.bulk_copies;
  if (adds) block.counters.reductions += box.bytes() / sizeof(float);
  if (block.counted) {
    block.counters.shared_read_bytes += box.bytes();
    block.counters.add_engine_wavefronts(box.bytes() / 128);
    for_each_unit(box, [&](u32, const unsigned char* target, u32 bytes) {
      if (target) block.counters.global_write_bytes += bytes;
    });
  }
  if (!inside) return;
  if (!block.launch.late_copies) move_out(block, store);
  if (block.launch.late_copies || block.checked) thread.stores.push(store);
  if (adds && block.checked) thread.additions.push_back(store);
}

}  // namespace

unsigned char* bulk_bytes(Thread& thread, u32 smem, u32 bytes, Site site) {
  check_place(thread, smem, bytes, smem % kUnit == 0 && bytes % kUnit == 0,
              "a bulk copy takes multiples of 16 bytes at a multiple of 16", site);
  return thread.block->at(smem);
}

void end_additions(Thread& thread) {
  for (const BulkStore& store : thread.additions_read) move_out(*thread.block, store);
  thread.additions_read.clear();
}

bool land_one(Block& block) {
  if (block.bulk_copies.empty()) return false;
  land(block, take_next(block, block.bulk_copies));
  return true;
}

}  // namespace cufa_host

void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, Site site) {
  load({*map, smem, {c0, c1, c2, c3}}, barrier, site);
}
void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, Site site) {
  load(linear(global, smem, bytes), barrier, site);
}
void tma_store_4d(const TensorMap* map, u32 smem, int c0, int c1, int c2, int c3, Site site) {
  send({*map, smem, {c0, c1, c2, c3}}, false, site);
}
void bulk_add_f32(float* global, u32 smem, u32 bytes, Site site) { send(linear(global, smem, bytes), true, site); }

void bulk_commit() {
  Thread& thread = current();
  if (thread.block->launch.late_copies || thread.block->checked) thread.stores.commit();
}
// An addition reaches global memory when the next additions have been read, or when a thread waits for it: no earlier.
void bulk_wait_read() {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!thread.stores.in_flight().empty()) end_additions(thread);
  thread.stores.wait(0, [&](const BulkStore& store) {
    if (block.launch.late_copies && store.adds) {
      const unsigned char* const from = block.at(store.box.smem);
      thread.additions_read.push_back(store);
      thread.additions_read.back().sent.assign(from, from + store.box.bytes());
    } else if (block.launch.late_copies) {
      move_out(block, store);
    }
    if (block.checked) block.races.end_sending(thread, store.box.smem, store.box.bytes(), store.site);
  });
}
void bulk_wait() {
  bulk_wait_read();
  Thread& thread = current();
  end_additions(thread);
  for (const BulkStore& store : thread.additions) {  // done: other threads may learn of them
    for_each_unit(store.box, [&](u32, const unsigned char* target, u32 bytes) {
      check_global(thread, target, bytes, Access::sum, "TMA", store.site);
    });
  }
  thread.additions.clear();
}

void async_proxy_fence() {
  Thread& thread = current();
  if (thread.block->checked) thread.block->races.fence_proxies(thread);
}
void global_proxy_fence() { async_proxy_fence(); }
