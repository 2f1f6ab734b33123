// Races with the copy engine: what lands in shared memory, what is sent from it, what it counts on.
#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

void RaceDetector::begin_sending(Thread& thread, u32 smem, u32 bytes, Site site) {
  access(thread, smem, bytes, Access::proxy_read, site);
  const int first = (smem - kSharedBase) / kChunkBytes;
  for (int chunk = first; chunk < first + int(bytes / kChunkBytes); ++chunk) {
    sending_.push_back({chunk, thread.number, site});
    ++is_sent_[chunk];
  }
}

void RaceDetector::end_sending(Thread& thread, u32 smem, u32 bytes, Site site) {
  const int first = (smem - kSharedBase) / kChunkBytes, last = first + int(bytes / kChunkBytes);
  const auto ended = [&](const Sending& s) {
    if (s.thread != thread.number || s.chunk < first || s.chunk >= last) return false;
    --is_sent_[s.chunk];
    return true;
  };
  sending_.erase(std::remove_if(sending_.begin(), sending_.end(), ended), sending_.end());
  access(thread, smem, bytes, Access::proxy_read, site);  // until now
}

void RaceDetector::check_sending(Thread& thread, int chunk, u64 address, Site site) {
  for (const Sending& s : sending_) {
    if (s.chunk == chunk) report("copy-not-awaited", thread, address, site, s.thread, s.site);
  }
}

void RaceDetector::taint(u32 smem, const void* global, Site site) {
  tainted_[(smem - kSharedBase) / kChunkBytes] = {global, site};
}

void RaceDetector::check_taint(Thread& thread, int chunk, u64 address, Access kind, Site site) {
  const auto found = tainted_.find(chunk);
  if (found == tainted_.end()) return;
  if (is_read(kind)) {
    const Taint& taint = found->second;
    cufa_host::report(*block_, "race", site, taint.site, [&] {
      return "reads a copy of " + global_place(block_->launch, taint.global, kPartBytes) +
             ", which another block may have been writing: shared offset " + std::to_string(address - kSharedBase) + ", " +
             describe(thread) + " at " + describe(site) + "; copied at " + describe(taint.site);
    });
  }
  tainted_.erase(found);
}

void RaceDetector::check_initialised(Thread& thread, u32 address, const Mbarrier& barrier, Site site) {
  access(thread, address, 8, Access::read, site);
  const VectorClock& clock = clocks_.of[thread.number];
  const bool by_init_fence =
      barrier.fenced && (barrier.initialiser == thread.number || clock[barrier.initialiser] >= barrier.fenced);
  if (by_init_fence || clock.fenced(barrier.initialiser) >= barrier.initialised) return;
  cufa_host::report(*block_, "proxy-fence", site, {"", 0}, [&] {
    return "the copy engine may not see that the mbarrier at shared offset " + std::to_string(address - kSharedBase) +
           " was initialised, no fence.mbarrier_init by " + describe_thread(barrier.initialiser) + " comes before: " +
           describe(thread) + " at " + describe(site);
  });
}

void RaceDetector::complete(Thread& thread, u32 smem, u32 bytes) {
  const auto land = [&](Write& write) {
    if (!write.in_flight || write.thread != thread.number) return;
    write.in_flight = false;
    write.clock = clocks_.time[thread.number / 32];
  };
  for (const u32 end = smem + bytes; smem < end;) {
    const u32 chunk = (smem - kSharedBase) / kChunkBytes,
              next = std::min(end, (smem / kChunkBytes + 1) * kChunkBytes);
    land(writes_[chunk]);
    if (first_part_[chunk] >= 0) {
      for (u32 at = smem; at < next; at += kPartBytes) {
        land(writes_[first_part_[chunk] + at % kChunkBytes / kPartBytes]);
      }
    }
    smem = next;
  }
}

void RaceDetector::publish_copy(Thread& thread, u32 smem, u32 bytes, VectorClock& clock) {
  complete(thread, smem, bytes);
  u32& time = clocks_.time[thread.number / 32];
  clock[thread.number] = std::max(clock[thread.number], time++);
}

}  // namespace cufa_host
