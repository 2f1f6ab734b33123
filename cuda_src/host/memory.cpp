// Loads and stores: translation, range checks, counting; and launches that overlap.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

void copy(void* to, const void* from, u32 bytes) {  // a constant size is one move
  switch (bytes) {
    case 2: std::memcpy(to, from, 2); return;
    case 4: std::memcpy(to, from, 4); return;
    case 8: std::memcpy(to, from, 8); return;
    case 16: std::memcpy(to, from, 16); return;
    default: std::memcpy(to, from, bytes);
  }
}

std::string hex(u64 value) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

u64 offset_in(const CufaArray& array, u64 at) { return at - reinterpret_cast<u64>(array.begin); }

bool inside(const CufaArray& array, u64 at, u32 bytes) {
  const u64 offset = offset_in(array, at);  // beyond `bytes` for an address before the array
  if (offset > array.bytes || array.bytes - offset < bytes) return false;
  if (!array.valid) return true;
  for (u64 g = offset / array.granule; g <= (offset + bytes - 1) / array.granule; ++g) {
    if (!array.valid[g]) return false;
  }
  return true;
}

// For counting sectors: as if every array began on a 256-byte boundary, as device allocations do.
u64 sector_address(const CufaLaunch& launch, const void* global) {
  const auto at = reinterpret_cast<u64>(global);
  for (int i = 0; i < launch.num_arrays; ++i) {
    const u64 offset = offset_in(launch.arrays[i], at);
    if (offset < launch.arrays[i].bytes) return u64(i + 1) << 48 | offset;
  }
  return at;
}

// Launches that overlap (griddepcontrol), checked mode: blocks of a dependent launch may begin while the previous launch is
// running. Until a thread has waited for the previous launch, it may not touch what that launch writes, nor write what it reads.
void check_overlap(Thread& thread, const CufaArray& array, const void* global, u32 bytes, Access kind, Site site) {
  const ClusterClocks& clocks = thread.block->cluster.clocks;
  const bool over = clocks.of[thread.number][clocks.previous_grid()] != 0;
  const u64 begin = offset_in(array, reinterpret_cast<u64>(global));
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    if (array.now) __atomic_fetch_or(&array.now[i], is_read(kind) ? kRead : kWritten, __ATOMIC_RELAXED);
    if (over || !array.before || !(array.before[i] & (is_read(kind) ? kWritten : kWritten | kRead))) continue;
    report(*thread.block, "race", site, {"launch before", 0}, [&] {
      return text_of("the launch before may still be ", array.before[i] & kWritten ? "writing " : "reading ",
                     global_place(thread.block->launch, global, bytes), ", no griddepcontrol.wait comes before: ", thread, " at ",
                     site);
    });
    return;
  }
}

void load_shared(void* value, u32 smem, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const unsigned char* from = shared_bytes(thread, smem, bytes, "ld.shared", site);
  if (!from) return void(std::memset(value, 0xff, bytes));
  copy(value, from, bytes);
  if (block.checked) block.races.access(thread, smem, bytes, Access::read, site);
  if (block.counted) count_shared(thread, AccessLog::shared_read, smem, bytes, site);
}

template <typename T>
T load_shared(u32 smem, Site site) {
  T value;
  load_shared(&value, smem, sizeof(T), site);
  return value;
}

void store_shared(u32 smem, const void* value, u32 bytes, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  unsigned char* to = shared_bytes(thread, smem, bytes, "st.shared", site);
  if (!to) return;
  copy(to, value, bytes);
  if (block.checked) block.races.access(thread, smem, bytes, Access::write, site);
  if (block.counted) count_shared(thread, AccessLog::shared_write, smem, bytes, site);
}

}  // namespace

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
  if (at < reinterpret_cast<u64>(nearest->begin)) return text_of(-offset_in(*nearest, at), " bytes before ", nearest->name);
  const std::string byte = text_of("byte ", offset_in(*nearest, at), " of ", nearest->name);
  if (best > 0) return text_of(byte, ", which has ", nearest->bytes);
  return inside(*nearest, at, bytes) ? byte : byte + ", which is padding between its rows or heads";
}

unsigned char* shared_memory() { return current().block->shared; }

unsigned char* shared_bytes(Thread& thread, u32 smem, u32 bytes, const char* what, Site site) {
  Block& block = *thread.block;
  ++thread.accesses;
  const u32 offset = offset_of(smem), size = block.launch.shared_bytes;
  if (__builtin_expect(offset > size || size - offset < bytes, 0)) {
    report(thread, "out-of-range", site, what, " of ", bytes, " bytes at shared offset ", int(offset), ", outside the block's ",
           size, " bytes");
    return nullptr;
  }
  if (__builtin_expect(offset % bytes, 0)) {
    report(thread, "misaligned", site, what, " of ", bytes, " bytes at shared offset ", offset, " is not aligned");
    return nullptr;
  }
  return block.shared + offset;
}

bool check_global(Thread& thread, const void* global, u32 bytes, Access kind, const char* what, Site site, bool* raced) {
  Block& block = *thread.block;
  const CufaLaunch& launch = block.launch;
  const auto at = reinterpret_cast<u64>(global);
  ++thread.accesses;
  if (at % bytes) {
    report(thread, "misaligned", site, what, " of ", bytes, " bytes at global address ", hex(at), " is not aligned");
    return false;
  }
  for (int i = 0; i < launch.num_arrays; ++i) {
    const CufaArray& array = launch.arrays[i];
    if ((!is_read(kind) && !array.writable) || !inside(array, at, bytes)) continue;
    if (block.checked && array.writable) {
      block.races.access_global(thread, global, bytes, kind, site);
      const bool ordered = block.cluster.owners.access(thread, i, global, bytes, kind, site);
      if (raced) *raced = !ordered;
      if (array.before || array.now) check_overlap(thread, array, global, bytes, kind, site);
    }
    return true;
  }
  report(*thread.block, "out-of-range", site, {}, [&] {
    return text_of(what, " of ", bytes, " bytes at ", global_place(launch, global, bytes), ": ", thread, " at ", site);
  });
  return false;
}

void count_shared(Thread& thread, AccessLog::Kind kind, u32 smem, u32 bytes, Site site) {
  Counters& counters = thread.block->counters;
  (kind == AccessLog::shared_read ? counters.shared_read_bytes : counters.shared_write_bytes) += bytes;
  thread.warp->log.add(kind, site, thread.lane, smem, bytes);
}
void count_global(Thread& thread, AccessLog::Kind kind, const void* global, u32 bytes, Site site) {
  Counters& counters = thread.block->counters;
  (kind == AccessLog::global_read ? counters.global_read_bytes : counters.global_write_bytes) += bytes;
  thread.warp->log.add(kind, site, thread.lane, sector_address(thread.block->launch, global), bytes);
}

void load_global(void* value, const void* global, u32 bytes, Site site) {
  Thread& thread = current();
  if (!check_global(thread, global, bytes, Access::read, "ld.global", site)) return void(std::memset(value, 0xff, bytes));
  copy(value, global, bytes);
  if (thread.block->counted) count_global(thread, AccessLog::global_read, global, bytes, site);
}

void store_global(void* global, const void* value, u32 bytes, Site site) {
  Thread& thread = current();
  if (!check_global(thread, global, bytes, Access::write, "st.global", site)) return;
  copy(global, value, bytes);
  if (thread.block->counted) count_global(thread, AccessLog::global_write, global, bytes, site);
}

}  // namespace cufa_host

u32 smem_address(const void* p) {
  return kSharedBase + static_cast<u32>(static_cast<const unsigned char*>(p) - current().block->shared);
}
void st_shared_u16(u32 smem, u16 v, Site site) { store_shared(smem, &v, 2, site); }
void st_shared_u32(u32 smem, u32 v, Site site) { store_shared(smem, &v, 4, site); }
void st_shared_f32(u32 smem, float v, Site site) { store_shared(smem, &v, 4, site); }
void st_shared_vec2(u32 smem, vec2 v, Site site) { store_shared(smem, &v, 8, site); }
void st_shared_vec4(u32 smem, vec4 v, Site site) { store_shared(smem, &v, 16, site); }
u16 ld_shared_u16(u32 smem, Site site) { return load_shared<u16>(smem, site); }
u32 ld_shared_u32(u32 smem, Site site) { return load_shared<u32>(smem, site); }
float ld_shared_f32(u32 smem, Site site) { return load_shared<float>(smem, site); }
vec2 ld_shared_vec2(u32 smem, Site site) { return load_shared<vec2>(smem, site); }
vec4 ld_shared_vec4(u32 smem, Site site) { return load_shared<vec4>(smem, site); }

u32 atomic_add(u32* p, u32 v, Site site) {
  return check_global(current(), p, 4, Access::atomic, "atom.add", site) ? __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST) : 0;
}
u32 atomic_inc_wrap(u32* counter, u32 last, Site site) {
  Thread& thread = current();
  if (!check_global(thread, counter, 4, Access::atomic, "atom.inc", site)) return 0;
  if (thread.block->checked) return thread.block->cluster.owners.count_in(thread, counter, last);
  u32 old = __atomic_load_n(counter, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(counter, &old, old >= last ? 0 : old + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

void grid_release_next() { ++current().block->counters.grid_releases; }
void grid_await_previous() {
  Thread& thread = current();
  ClusterClocks& clocks = thread.block->cluster.clocks;
  if (thread.block->checked) clocks.of[thread.number][clocks.previous_grid()] = 1;
}
