// cp.async. Data moves when the copy is issued ("early") or when its group is waited for ("late"): a kernel must be right under
// both, for the hardware may do either.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {

static void move(Block& block, const PendingCopy& copy) {
  if (copy.global) {
    std::memcpy(block.at(copy.smem), copy.global, copy.bytes);
  } else {
    std::memset(block.at(copy.smem), 0, copy.bytes);
  }
}

void copy_async(u32 smem, const void* global, u32 bytes, bool valid, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  ++block.counters.async_copies;
  if (!shared_bytes(thread, smem, bytes, "cp.async", site)) return;
  if (valid && !check_global(thread, global, bytes, Access::read, "cp.async", site)) return;
  const PendingCopy copy = {smem, bytes, valid ? global : nullptr};
  if (!block.launch.late_copies) move(block, copy);
  if (block.checked) block.races.access(thread, smem, bytes, Access::async_write, site);
  if (block.counted) {
    count_shared(thread, AccessLog::shared_write, smem, bytes, site);
    if (valid) count_global(thread, AccessLog::global_read, global, bytes, site);
  }
  if (block.launch.late_copies || block.checked) thread.copies.push(copy);
}

void await_copies(u32 pending) {
  Thread& thread = current();
  Block& block = *thread.block;
  thread.copies.wait(pending, [&](const PendingCopy& copy) {
    if (block.launch.late_copies) move(block, copy);
    if (block.checked) block.races.complete(thread, copy.smem, copy.bytes);
  });
}

}  // namespace cufa_host

void cp_async_16(u32 smem, const void* global, bool valid, Site site) { copy_async(smem, global, 16, valid, site); }
void cp_async_commit() {
  Thread& thread = current();
  if (thread.block->launch.late_copies || thread.block->checked) thread.copies.commit();
}
