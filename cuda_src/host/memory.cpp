// Loads and stores: translation, range checks, counting.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

void copy(void* to, const void* from, u32 bytes) {  // constant sizes: one move each
  switch (bytes) {
    case 2:
      std::memcpy(to, from, 2);
      return;
    case 4:
      std::memcpy(to, from, 4);
      return;
    case 8:
      std::memcpy(to, from, 8);
      return;
    case 16:
      std::memcpy(to, from, 16);
      return;
    default:
      std::memcpy(to, from, bytes);
  }
}

std::string hex(u64 value) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

bool inside(const CufaArray& array, u64 at, u32 bytes) {
  const auto begin = reinterpret_cast<u64>(array.begin);
  if (at < begin || at - begin > array.bytes || array.bytes - (at - begin) < bytes) return false;
  if (!array.valid) return true;
  for (u64 g = (at - begin) / array.granule; g <= (at - begin + bytes - 1) / array.granule; ++g) {
    if (!array.valid[g]) return false;
  }
  return true;
}

}  // namespace

u64 sector_address(const CufaLaunch& launch, const void* global) {
  const auto at = reinterpret_cast<u64>(global);
  for (int i = 0; i < launch.num_arrays; ++i) {
    const u64 offset = at - reinterpret_cast<u64>(launch.arrays[i].begin);
    if (offset < launch.arrays[i].bytes) return u64(i + 1) << 48 | offset;
  }
  return at;
}

std::string global_place(const CufaLaunch& launch, const void* global, u32 bytes) {
  const auto at = reinterpret_cast<u64>(global);
  const CufaArray* nearest = nullptr;
  u64 best = ~0ull;
  for (int i = 0; i < launch.num_arrays; ++i) {
    const auto begin = reinterpret_cast<u64>(launch.arrays[i].begin), end = begin + launch.arrays[i].bytes;
    const u64 away = at < begin ? begin - at : at + bytes > end ? at + bytes - end : 0;
    if (away < best) best = away, nearest = &launch.arrays[i];
  }
  if (!nearest) return hex(at) + ", and the kernel was given no arrays";
  const auto begin = reinterpret_cast<u64>(nearest->begin);
  const std::string name = nearest->name;
  if (at < begin) return std::to_string(begin - at) + " bytes before " + name;
  const std::string byte = "byte " + std::to_string(at - begin) + " of " + name;
  if (best > 0) return byte + ", which has " + std::to_string(nearest->bytes);
  return inside(*nearest, at, bytes) ? byte : byte + ", which is padding between its rows or heads";
}

unsigned char* shared_memory() { return current().block->shared; }

u32 shared_address(const void* pointer) {
  return kSharedBase + static_cast<u32>(static_cast<const unsigned char*>(pointer) - current().block->shared);
}

unsigned char* shared_bytes(Thread& thread, u32 smem, u32 bytes, const char* what, Site site) {
  Block& block = *thread.block;
  ++thread.accesses;
  const u32 offset = smem - kSharedBase, size = block.launch.shared_bytes;
  if (__builtin_expect(offset > size || size - offset < bytes, 0)) {
    report(block, "out-of-range", site, {"", 0}, [&] {
      return std::string(what) + " of " + std::to_string(bytes) + " bytes at shared offset " +
             std::to_string(static_cast<int>(offset)) + ", outside the block's " + std::to_string(size) +
             " bytes: " + describe(thread) + " at " + describe(site);
    });
    return nullptr;
  }
  if (__builtin_expect(offset % bytes, 0)) {
    report(block, "misaligned", site, {"", 0}, [&] {
      return std::string(what) + " of " + std::to_string(bytes) + " bytes at shared offset " +
             std::to_string(offset) + " is not aligned: " + describe(thread) + " at " + describe(site);
    });
    return nullptr;
  }
  return block.shared + offset;
}

bool check_global(Thread& thread, const void* global, u32 bytes, Access kind, const char* what, Site site,
                  bool* raced) {
  Block& block = *thread.block;
  const CufaLaunch& launch = block.launch;
  const auto at = reinterpret_cast<u64>(global);
  ++thread.accesses;
  if (at % bytes) {
    report(block, "misaligned", site, {"", 0}, [&] {
      return std::string(what) + " of " + std::to_string(bytes) + " bytes at global address " + hex(at) +
             " is not aligned: " + describe(thread) + " at " + describe(site);
    });
    return false;
  }
  for (int i = 0; i < launch.num_arrays; ++i) {
    const CufaArray& array = launch.arrays[i];
    if ((!is_read(kind) && !array.writable) || !inside(array, at, bytes)) continue;
    if (block.checked && array.writable) {
      block.races.access_global(thread, global, bytes, kind, site);
      const bool ordered = block.owners.access(thread, i, global, bytes, kind, site);
      if (raced) *raced = !ordered;
      if (array.before || array.now) check_overlap(thread, array, global, bytes, kind, site);
    }
    return true;
  }
  report(block, "out-of-range", site, {"", 0}, [&] {
    return std::string(what) + " of " + std::to_string(bytes) + " bytes at " + global_place(launch, global, bytes) +
           ": " + describe(thread) + " at " + describe(site);
  });
  return false;
}

void load_shared(void* value, u32 smem, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const unsigned char* from = shared_bytes(thread, smem, bytes, "ld.shared", site);
  if (!from) return void(std::memset(value, 0xff, bytes));
  copy(value, from, bytes);
  if (block.checked) block.races.access(thread, smem, bytes, Access::read, site);
  if (block.counted) {
    block.counters.shared_read_bytes += bytes;
    thread.warp->log.add(AccessLog::shared_read, site, thread.lane, smem, bytes);
  }
}

void store_shared(u32 smem, const void* value, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  unsigned char* to = shared_bytes(thread, smem, bytes, "st.shared", site);
  if (!to) return;
  copy(to, value, bytes);
  if (block.checked) block.races.access(thread, smem, bytes, Access::write, site);
  if (block.counted) {
    block.counters.shared_write_bytes += bytes;
    thread.warp->log.add(AccessLog::shared_write, site, thread.lane, smem, bytes);
  }
}

void load_global(void* value, const void* global, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!check_global(thread, global, bytes, Access::read, "ld.global", site))
    return void(std::memset(value, 0xff, bytes));
  copy(value, global, bytes);
  if (block.counted) {
    block.counters.global_read_bytes += bytes;
    thread.warp->log.add(AccessLog::global_read, site, thread.lane, sector_address(block.launch, global), bytes);
  }
}

void store_global(void* global, const void* value, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!check_global(thread, global, bytes, Access::write, "st.global", site)) return;
  copy(global, value, bytes);
  if (block.counted) {
    block.counters.global_write_bytes += bytes;
    thread.warp->log.add(AccessLog::global_write, site, thread.lane, sector_address(block.launch, global), bytes);
  }
}

u32 add_global(u32* global, u32 value, Site site) {
  if (!check_global(current(), global, 4, Access::atomic, "atom.add", site)) return 0;
  return __atomic_fetch_add(global, value, __ATOMIC_SEQ_CST);
}

u32 increment_global(u32* global, u32 last, Site site) {
  Thread& thread = current();
  if (!check_global(thread, global, 4, Access::atomic, "atom.inc", site)) return 0;
  if (thread.block->checked) return thread.block->owners.count_in(thread, global, last);
  u32 old = __atomic_load_n(global, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(global, &old, old >= last ? 0 : old + 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  return old;
}

}  // namespace cufa_host
