// Sums in global memory that many blocks add to, and counters by which blocks wait for one another.
#include "host/runtime.h"

namespace cufa_host {

void add_atomically(float* global, const float* values, u32 count) {
  for (u32 i = 0; i < count; ++i) {
    u32* bits = reinterpret_cast<u32*>(global + i);
    u32 old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    const auto sum = [&] {
      return float_as_u32(flush_subnormal(flush_subnormal(u32_as_float(old)) + flush_subnormal(values[i])));
    };
    while (!__atomic_compare_exchange_n(bits, &old, sum(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

template <u32 COUNT>
static void add_to_global(float* global, const float (&values)[COUNT], Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!check_global(thread, global, sizeof(values), Access::sum, "red.add", site)) return;
  add_atomically(global, values, COUNT);
  block.counters.reductions += COUNT;
  if (block.counted) count_global(thread, AccessLog::global_write, global, sizeof(values), site);
}

}  // namespace cufa_host

void red_add_f32(float* p, float v, Site site) { add_to_global(p, {v}, site); }
void red_add_f32x4(float* p, float v0, float v1, float v2, float v3, Site site) { add_to_global(p, {v0, v1, v2, v3}, site); }
void red_add_u64(void* p, u64 v, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!check_global(thread, p, 8, Access::atomic, "red.add", site)) return;
  __atomic_fetch_add(static_cast<u64*>(p), v, __ATOMIC_RELAXED);
  block.counters.reductions += 1;
  if (block.counted) count_global(thread, AccessLog::global_write, p, 8, site);
}
void red_max_u32(u32* p, u32 v, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (!check_global(thread, p, 4, Access::sum, "red.max", site)) return;
  u32 old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  block.counters.reductions += 1;
  if (block.counted) count_global(thread, AccessLog::global_write, p, 4, site);
}

void red_release_gpu_add(u32* counter, u32 v, Site site) {
  Thread& thread = current();
  if (!check_global(thread, counter, 4, Access::atomic, "red.release", site)) return;
  if (thread.block->checked) return thread.block->cluster.owners.release(thread, counter, v);
  __atomic_fetch_add(counter, v, __ATOMIC_SEQ_CST);
}
u32 ld_acquire_gpu(const u32* counter, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Owners& owners = block.cluster.owners;
  // A thread that loads the same count again waits until the count changes: if it has made no other access since, or has come
  // back so often that it makes no progress.
  constexpr u32 kPatience = 10000;
  thread.polls = thread.polled == counter ? thread.polls + 1 : 0;
  const bool again = thread.polled == counter && (thread.polled_at == thread.accesses || thread.polls > kPatience);
  for (bool waited = !again;; waited = true) {
    if (!check_global(thread, counter, 4, Access::atomic, "ld.acquire", site)) return 0;
    const u32 count = block.checked ? owners.load(thread, counter) : __atomic_load_n(counter, __ATOMIC_SEQ_CST);
    if (count != thread.polled_count) thread.polls = 0;
    if (waited || count != thread.polled_count) {
      thread.polled = counter;
      thread.polled_count = count;
      thread.polled_at = thread.accesses;
      return count;
    }
    block.polling.push_back(&thread);
    park(thread, "a counter in global memory", site);
  }
}
