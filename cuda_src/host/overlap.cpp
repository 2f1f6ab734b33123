// Launches that overlap (griddepcontrol), checked mode: the blocks of a dependent launch may begin while the one before it is
// still at work, so until a thread has waited for that, it may not touch what that writes, nor write what that reads.
#include "host/decode_host.h"
#include "host/runtime.h"

namespace cufa_host {

void let_next_launch_begin() { ++current().block->counters.grid_releases; }

void await_launch_before() {
  Thread& thread = current();
  ClusterClocks& clocks = thread.block->cluster.clocks;
  if (thread.block->checked) clocks.of[thread.number][clocks.previous_grid()] = 1;
}

void check_overlap(Thread& thread, const CufaArray& array, const void* global, u32 bytes, Access kind, Site site) {
  const ClusterClocks& clocks = thread.block->cluster.clocks;
  const bool over = clocks.of[thread.number][clocks.previous_grid()] != 0;
  const u64 begin = reinterpret_cast<u64>(global) - reinterpret_cast<u64>(array.begin);
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    if (array.now) __atomic_fetch_or(&array.now[i], is_read(kind) ? kRead : kWritten, __ATOMIC_RELAXED);
    if (over || !array.before || !(array.before[i] & (is_read(kind) ? kWritten : kWritten | kRead))) continue;
    report(*thread.block, "race", site, {"launch before", 0}, [&] {
      return std::string("the launch before may still be ") + (array.before[i] & kWritten ? "writing " : "reading ") +
             global_place(thread.block->launch, global, bytes) + ", no griddepcontrol.wait comes before: " +
             describe(thread) + " at " + describe(site);
    });
    return;
  }
}

}  // namespace cufa_host
