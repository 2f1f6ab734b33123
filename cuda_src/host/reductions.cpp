// Sums in global memory that many blocks add to, and counters by which blocks wait for one another.
#include "host/backward_host.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

void add_one(float* global, float value) {
  u32* bits = reinterpret_cast<u32*>(global);
  u32 old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  const auto sum = [&] { return float_as_u32(flush_subnormal(flush_subnormal(u32_as_float(old)) + flush_subnormal(value))); };
  while (!__atomic_compare_exchange_n(bits, &old, sum(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace

void add_atomically(float* global, const float* values, u32 count) {
  for (u32 i = 0; i < count; ++i) add_one(global + i, values[i]);
}

void add_to_global(float* global, const float* values, u32 count, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  const u32 bytes = count * sizeof(float);
  if (!check_global(thread, global, bytes, Access::sum, "red.add", site)) return;
  add_atomically(global, values, count);
  block.counters.reductions += count;
  if (block.counted) {
    block.counters.global_write_bytes += bytes;
    thread.warp->log.add(AccessLog::global_write, site, thread.lane, sector_address(block.launch, global), bytes);
  }
}

void release_count(u32* counter, u32 value, Site site) {
  Thread& thread = current();
  if (!check_global(thread, counter, 4, Access::atomic, "red.release", site)) return;
  if (thread.block->checked) return thread.block->owners.release(thread, counter, value);
  __atomic_fetch_add(counter, value, __ATOMIC_SEQ_CST);
}

static u32 load_count(const u32* counter, bool acquires, const char* what, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  // A thread that loads the same count again in the same way waits until it changes: if it has done nothing else meanwhile,
  // or has come back so often that it does nothing else of use.
  constexpr u32 kPatience = 10000;
  const bool same = thread.polled == counter && thread.polled_acquires == acquires;
  thread.polls = same ? thread.polls + 1 : 0;
  const bool again = same && (thread.polled_at == thread.accesses || thread.polls > kPatience);
  for (bool waited = !again;; waited = true) {
    if (!check_global(thread, counter, 4, Access::atomic, what, site)) return 0;
    const u32 count = !block.checked ? __atomic_load_n(counter, __ATOMIC_SEQ_CST)
                      : acquires     ? block.owners.acquire(thread, counter)
                                     : block.owners.look(thread, counter);
    if (count != thread.polled_count) thread.polls = 0;
    if (waited || count != thread.polled_count) {
      thread.polled = counter;
      thread.polled_acquires = acquires;
      thread.polled_count = count;
      thread.polled_at = thread.accesses;
      return count;
    }
    block.polling.push_back(&thread);
    park(thread, "a counter in global memory", site);
  }
}

u32 acquire_count(const u32* counter, Site site) { return load_count(counter, true, "ld.acquire", site); }
u32 relaxed_count(const u32* counter, Site site) { return load_count(counter, false, "ld.relaxed", site); }

}  // namespace cufa_host
