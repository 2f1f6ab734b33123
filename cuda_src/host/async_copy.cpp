// cp.async. Data moves when the copy is issued ("early") or when its group is waited for ("late"): a kernel must be
// right under both, for the hardware may do either.
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

void move(Block& block, const PendingCopy& copy) {
  unsigned char* to = block.shared + (copy.smem - kSharedBase);
  if (copy.global) {
    std::memcpy(to, copy.global, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

}  // namespace

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
    block.counters.shared_write_bytes += bytes;
    thread.warp->log.add(AccessLog::shared_write, site, thread.lane, smem, bytes);
    if (valid) {
      block.counters.global_read_bytes += bytes;
      thread.warp->log.add(AccessLog::global_read, site, thread.lane, sector_address(block.launch, global), bytes);
    }
  }
  if (block.launch.late_copies || block.checked) thread.copies.push(copy);
}

void commit_copies() {
  Thread& thread = current();
  if (thread.block->launch.late_copies || thread.block->checked) thread.copies.commit();
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
