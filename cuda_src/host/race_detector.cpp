#include "host/race_detector.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

void ClusterClocks::reset(int num_threads) {
  size = num_threads + 2;
  of.resize(num_threads);
  for (VectorClock& clock : of) clock.clear(size);
  time.assign(num_threads / 32, 1);
}

VectorClock& RaceDetector::of(const Thread& thread) const { return clocks_.of[thread.number]; }
u32& RaceDetector::time(const Thread& thread) const { return clocks_.time[thread.number / 32]; }

void RaceDetector::reset(Block& block) {
  block_ = &block;
  num_warps_ = block.num_warps;
  const std::size_t chunks = (block.launch.shared_bytes + kChunkBytes - 1) / kChunkBytes;
  writes_.assign(chunks, {});
  reads_.assign(chunks * num_warps_, {});
  first_part_.assign(chunks, -1);
  global_chunks_.clear();
  additions_.clear();
  sending_.clear();
  is_sent_.assign(chunks, 0);
  tainted_.clear();
  remote_.clear();
  left_.clear(clocks_.size);
}

void RaceDetector::release(Thread& thread, VectorClock& clock) {
  clock.join(of(thread));
  clock[thread.number] = std::max(clock[thread.number], time(thread)++);
}
void RaceDetector::acquire(Thread& thread, const VectorClock& clock) { of(thread).join(clock); }
void RaceDetector::fence_proxies(Thread& thread) { of(thread).fence(thread.number, time(thread)++); }

// A new cell: a copy of cell `like`, or never touched if `like` is negative.
int RaceDetector::add_cell(int like) {
  const int cell = static_cast<int>(writes_.size());
  writes_.push_back(like < 0 ? Write{} : writes_[like]);
  first_part_.push_back(-1);
  for (int w = 0; w < num_warps_; ++w) {
    reads_.push_back(like < 0 ? Reads{} : reads_[std::size_t(like) * num_warps_ + w]);
  }
  if (additions_.count(like)) additions_[cell] = std::vector<Reads>(additions_[like]);
  return cell;
}

inline void RaceDetector::note(Reads& reads, const Thread& thread, bool by_proxy, Site site) {
  const u32 now = time(thread);
  if (reads.clock != now) {  // only the latest are kept: an access ordered after them comes after earlier ones too
    reads.clock = now;
    reads.lanes = 0;
    reads.by_proxy = true;
  }
  reads.by_proxy = reads.by_proxy && by_proxy;
  reads.lanes |= thread.bit();
  reads.site = site;
}

inline void RaceDetector::check_order(const Reads* by_warp, Thread& thread, u64 address, bool by_proxy, Site site,
                                      const char* unordered) {
  for (int w = 0; w < num_warps_; ++w) {
    if (by_warp[w].lanes) check_warp(by_warp[w], w, thread, address, by_proxy, site, unordered);
  }
}

void RaceDetector::check_warp(const Reads& reads, int warp, Thread& thread, u64 address, bool by_proxy, Site site,
                              const char* unordered) {
  const int me = thread.number, first = block_->rank * block_->num_threads + warp * 32;
  for (u32 lanes = reads.lanes; lanes; lanes &= lanes - 1) {
    const int other = first + __builtin_ctz(lanes);
    const bool in_order = ordered(other, reads.clock, me);
    const bool seen = !by_proxy || reads.by_proxy || clocks_.of[me].fenced(other) >= reads.clock;
    if (in_order && seen) continue;
    report(in_order ? "proxy-fence" : unordered, thread, address, site, other, reads.site);
    return;
  }
}

void RaceDetector::access(Thread& thread, u32 smem, u32 bytes, Access kind, Site site) {
  const u32 end = smem + bytes;
  while (smem < end) {  // kSharedBase is a multiple of the chunk
    const u32 part = std::min(end, (smem / kChunkBytes + 1) * kChunkBytes) - smem;
    access_chunk(thread, offset_of(smem) / kChunkBytes, smem, part, kind, site);
    smem += part;
  }
}

void RaceDetector::access_global(Thread& thread, const void* global, u32 bytes, Access kind, Site site) {
  const auto address = reinterpret_cast<u64>(global) | kGlobal;  // aligned to `bytes`, at most 16: inside one chunk
  const auto found = global_chunks_.find(address / kChunkBytes);
  const int chunk = found != global_chunks_.end() ? found->second : add_cell(-1);
  if (found == global_chunks_.end()) global_chunks_.emplace(address / kChunkBytes, chunk);
  access_chunk(thread, chunk, address, bytes, kind, site);
}

void RaceDetector::access_chunk(Thread& thread, int chunk, u64 address, u32 bytes, Access kind, Site site) {
  if (!is_read(kind) && std::size_t(chunk) < is_sent_.size() && is_sent_[chunk]) check_sending(thread, chunk, address, site);
  if (!tainted_.empty()) check_taint(thread, chunk, address, kind, site);
  const auto check = [&](int cell, u64 at) {
    if (is_read(kind)) {
      check_read(thread, cell, at, kind == Access::proxy_read, site);
    } else if (is_atomic(kind)) {
      check_atomic(thread, cell, at, kind, site);
    } else {
      check_write(thread, cell, at, kind, site);
    }
  };
  if (first_part_[chunk] < 0) {
    if (bytes == kChunkBytes) return check(chunk, address);
    const int first = add_cell(chunk);
    for (int i = 1; i < kParts; ++i) add_cell(chunk);
    first_part_[chunk] = first;
  }
  const u32 offset = address % kChunkBytes;
  for (u32 part = offset / kPartBytes; part * kPartBytes < offset + bytes; ++part) {
    check(first_part_[chunk] + part, address - offset + part * kPartBytes);
  }
}

inline void RaceDetector::check_after_write(Thread& thread, int cell, u64 address, bool by_proxy, Site site) {
  const Write& write = writes_[cell];
  const char* kind = nullptr;
  if (write.in_flight) {
    kind = "copy-not-awaited";
  } else if (write.clock && !ordered(write.thread, write.clock, thread.number)) {
    kind = "race";
  } else if (by_proxy && write.clock && !write.by_proxy && of(thread).fenced(write.thread) < write.clock) {
    kind = "proxy-fence";
  }
  if (kind) report(kind, thread, address, site, write.thread, write.site);
}

const std::vector<RaceDetector::Reads>* RaceDetector::additions_to(int cell, u64 address) const {
  const auto found = address & kGlobal ? additions_.find(cell) : additions_.end();
  return found == additions_.end() ? nullptr : &found->second;
}

void RaceDetector::check_read(Thread& thread, int cell, u64 address, bool by_proxy, Site site) {
  if (writes_[cell].clock == 0 && !(address & kGlobal)) {
    report("never-written", thread, address, site, -1, {});
  } else {
    check_after_write(thread, cell, address, by_proxy, site);
  }
  if (const std::vector<Reads>* sums = additions_to(cell, address)) check_order(sums->data(), thread, address, by_proxy, site);
  note(reads_[std::size_t(cell) * num_warps_ + thread.id / 32], thread, by_proxy, site);
}

void RaceDetector::check_write(Thread& thread, int cell, u64 address, Access kind, Site site) {
  const bool by_proxy = kind == Access::proxy_write;
  check_after_write(thread, cell, address, by_proxy, site);
  Reads* reads = &reads_[std::size_t(cell) * num_warps_];
  check_order(reads, thread, address, by_proxy, site);
  for (int w = 0; w < num_warps_; ++w) reads[w].lanes = 0;
  if (const std::vector<Reads>* sums = additions_to(cell, address)) {
    check_order(sums->data(), thread, address, by_proxy, site);
    additions_.erase(cell);
  }
  writes_[cell] = {time(thread), static_cast<u16>(thread.number), by_proxy || kind == Access::async_write, by_proxy, site};
}

void RaceDetector::check_atomic(Thread& thread, int cell, u64 address, Access kind, Site site) {
  const Write& write = writes_[cell];
  if (write.clock && !ordered(write.thread, write.clock, thread.number)) {
    report("race", thread, address, site, write.thread, write.site);
  }
  check_order(&reads_[std::size_t(cell) * num_warps_], thread, address, false, site);
  std::vector<Reads>& additions = additions_[cell];
  additions.resize(num_warps_);
  if (is_sum(kind) && block_->launch.ordered_sums) {
    check_order(additions.data(), thread, address, false, site, "unordered-sum");
  }
  note(additions[thread.id / 32], thread, false, site);
}

std::string RaceDetector::describe_thread(int number) const {
  const int id = number % block_->num_threads, rank = number / block_->num_threads;
  const std::string text = text_of("warp ", id / 32, " lane ", id % 32);
  return block_->cluster.size() == 1 ? text : text_of(block_->cluster.blocks[rank]->index, " ", text);
}

bool RaceDetector::can_store(Thread& thread, Site site) {
  const bool has_begun = of(thread)[clocks_.phases()] != 0;
  if (block_->alive() && has_begun) {
    remote_[thread.number] = {time(thread), site};
    return true;
  }
  const char* why = block_->alive() ? "may not have begun, no barrier of the cluster tells" : "has ended";
  cufa_host::report(thread, "block-not-running", site, "store to shared memory of ", block_->index, ", which ", why);
  return false;
}

bool RaceDetector::knows(const Thread& thread, const Mbarrier& barrier) const {
  const VectorClock& clock = of(thread);
  return clock[barrier.initialiser] >= barrier.initialised ||
         (barrier.announced && clock[clocks_.phases()] >= barrier.announced);
}

void RaceDetector::leave(Thread& thread) {
  left_.join(of(thread));
  if (block_->alive()) return;
  for (const auto& [number, store] : remote_) {
    if (left_[number] >= store.clock) continue;
    cufa_host::report(*block_, "block-not-running", store.site, {}, [&, writer = number, from = store.site] {
      return text_of(block_->index, " does not wait, before it ends, for the store to its shared memory by ",
                     describe_thread(writer), " at ", from);
    });
  }
}

void RaceDetector::report(const char* kind, Thread& thread, u64 address, Site site, int other, Site other_site) {
  cufa_host::report(*block_, kind, site, other_site, [&] {
    std::string where = address & kGlobal
                            ? global_place(block_->launch, reinterpret_cast<const void*>(address & ~kGlobal), kPartBytes)
                            : text_of("shared offset ", address - kSharedBase);
    if (!(address & kGlobal) && thread.block != block_) where += " of " + describe(block_->index);
    where += text_of(", ", thread, " at ", site);
    if (other < 0) return "read of shared memory that nothing has written: " + where;
    const std::string whom = text_of(describe_thread(other), " at ", other_site);
    switch (kind[0]) {
      case 'c': return "touches data of an asynchronous copy that was not waited for: " + where + "; issued by " + whom;
      case 'p': return "no fence.proxy.async between an ordinary access and the copy engine's or wgmma's: " + where +
                       "; the ordinary one is " + whom;
      case 'u': return "two threads add in any order: " + where + "; the other is " + whom;
      default: return "no barrier orders this access after another thread's: " + where + "; the other is " + whom;
    }
  });
}

// ---- The copy engine: what lands in shared memory, what is sent from it, the mbarriers that count it.

void RaceDetector::begin_sending(Thread& thread, u32 smem, u32 bytes, Site site) {
  access(thread, smem, bytes, Access::proxy_read, site);
  const int first = offset_of(smem) / kChunkBytes;
  for (int chunk = first; chunk < first + int(bytes / kChunkBytes); ++chunk) {
    sending_.push_back({chunk, thread.number, site});
    ++is_sent_[chunk];
  }
}

void RaceDetector::end_sending(Thread& thread, u32 smem, u32 bytes, Site site) {
  const int first = offset_of(smem) / kChunkBytes, last = first + int(bytes / kChunkBytes);
  const auto ended = [&](const Sending& s) {
    if (s.thread != thread.number || s.chunk < first || s.chunk >= last) return false;
    --is_sent_[s.chunk];
    return true;
  };
  sending_.erase(std::remove_if(sending_.begin(), sending_.end(), ended), sending_.end());
  access(thread, smem, bytes, Access::proxy_read, site);  // the read lasts until now
}

void RaceDetector::check_sending(Thread& thread, int chunk, u64 address, Site site) {
  for (const Sending& s : sending_) {
    if (s.chunk == chunk) report("copy-not-awaited", thread, address, site, s.thread, s.site);
  }
}

void RaceDetector::taint(u32 smem, const void* global, Site site) { tainted_[offset_of(smem) / kChunkBytes] = {global, site}; }

void RaceDetector::check_taint(Thread& thread, int chunk, u64 address, Access kind, Site site) {
  const auto found = tainted_.find(chunk);
  if (found == tainted_.end()) return;
  const Taint taint = found->second;
  tainted_.erase(found);
  if (!is_read(kind)) return;
  cufa_host::report(*block_, "race", site, taint.site, [&] {
    return text_of("reads a copy of ", global_place(block_->launch, taint.global, kPartBytes),
                   ", which another block may have been writing: shared offset ", address - kSharedBase, ", ", thread, " at ",
                   site, "; copied at ", taint.site);
  });
}

void RaceDetector::check_initialised(Thread& thread, u32 address, const Mbarrier& barrier, Site site) {
  access(thread, address, 8, Access::read, site);
  const VectorClock& clock = of(thread);
  const bool by_init_fence =
      barrier.fenced && (barrier.initialiser == thread.number || clock[barrier.initialiser] >= barrier.fenced);
  if (by_init_fence || clock.fenced(barrier.initialiser) >= barrier.initialised) return;
  cufa_host::report(*block_, "proxy-fence", site, {}, [&] {
    return text_of("the copy engine may not see that the mbarrier at shared offset ", offset_of(address),
                   " was initialised, no fence.mbarrier_init by ", describe_thread(barrier.initialiser), " comes before: ",
                   thread, " at ", site);
  });
}

void RaceDetector::complete(Thread& thread, u32 smem, u32 bytes) {
  const auto land = [&](Write& write) {
    if (!write.in_flight || write.thread != thread.number) return;
    write.in_flight = false;
    write.clock = time(thread);
  };
  for (const u32 end = smem + bytes; smem < end;) {
    const u32 chunk = offset_of(smem) / kChunkBytes, next = std::min(end, (smem / kChunkBytes + 1) * kChunkBytes);
    land(writes_[chunk]);
    for (u32 at = smem; first_part_[chunk] >= 0 && at < next; at += kPartBytes) {
      land(writes_[first_part_[chunk] + at % kChunkBytes / kPartBytes]);
    }
    smem = next;
  }
}

void RaceDetector::publish_copy(Thread& thread, u32 smem, u32 bytes, VectorClock& clock) {
  complete(thread, smem, bytes);
  clock[thread.number] = std::max(clock[thread.number], time(thread)++);
}

}  // namespace cufa_host
