#include "host/race_detector.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {
namespace {
constexpr int kParts = 8;         // of a 16-byte chunk
constexpr u32 kChunkBytes = 16, kPartBytes = 2;
}  // namespace

int RaceDetector::thread_id(const Thread& thread) { return thread.id; }

void RaceDetector::reset(Block& block, u32 shared_bytes, int num_threads) {
  block_ = &block;
  num_warps_ = num_threads / 32;
  num_chunks_ = static_cast<int>((shared_bytes + kChunkBytes - 1) / kChunkBytes);
  writes_.assign(num_chunks_, {});
  reads_.assign(std::size_t(num_chunks_) * num_warps_, {});
  first_part_.assign(num_chunks_, -1);
  clocks_.resize(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    clocks_[i].clear(num_threads);
    clocks_[i][i] = 1;
  }
}

void RaceDetector::release(Thread& thread, VectorClock& clock) {
  clock.join(clocks_[thread.id]);
  ++clocks_[thread.id][thread.id];
}

void RaceDetector::split(int chunk) {
  first_part_[chunk] = static_cast<int>(writes_.size());
  for (int i = 0; i < kParts; ++i) {
    writes_.push_back(writes_[chunk]);
    for (int w = 0; w < num_warps_; ++w) reads_.push_back(reads_[std::size_t(chunk) * num_warps_ + w]);
  }
}

void RaceDetector::access(Thread& thread, u32 address, u32 bytes, Access kind, Site site) {
  const u32 begin = address - kSharedBase, end = begin + bytes;
  const auto check = [&](int cell, u32 at) {
    if (kind == Access::read) {
      check_read(thread, cell, at, site);
    } else {
      check_write(thread, cell, at, kind == Access::async_write, site);
    }
  };
  for (u32 chunk = begin / kChunkBytes; chunk * kChunkBytes < end; ++chunk) {
    const u32 first = chunk * kChunkBytes;
    const bool whole = begin <= first && end >= first + kChunkBytes;
    if (first_part_[chunk] < 0) {
      if (whole) {
        check(chunk, first);
        continue;
      }
      split(chunk);
    }
    const u32 from = std::max(begin, first), to = std::min(end, first + kChunkBytes);
    for (u32 at = from & ~(kPartBytes - 1); at < to; at += kPartBytes) {
      check(first_part_[chunk] + (at - first) / kPartBytes, at);
    }
  }
}

void RaceDetector::complete(Thread& thread, u32 address, u32 bytes) {
  const u32 begin = address - kSharedBase;
  const auto land = [&](Write& write) {
    if (!write.in_flight || write.thread != thread.id) return;
    write.in_flight = false;
    write.clock = clocks_[thread.id][thread.id];
  };
  const u32 chunk = begin / kChunkBytes;  // copies are at most 16 bytes and aligned: one chunk
  land(writes_[chunk]);
  if (first_part_[chunk] < 0) return;
  for (u32 i = begin % kChunkBytes / kPartBytes; i < (begin % kChunkBytes + bytes) / kPartBytes; ++i) {
    land(writes_[first_part_[chunk] + i]);
  }
}

void RaceDetector::check_read(Thread& thread, int cell, u32 address, Site site) {
  const int me = thread.id;
  Write& write = writes_[cell];
  if (write.in_flight) {
    report("copy-not-awaited", thread, address, site, write.thread, write.site);
  } else if (write.clock == 0) {
    report("never-written", thread, address, site, -1, {"", 0});
    write.clock = 1;  // said once
    write.thread = static_cast<std::uint16_t>(me);
  } else if (!ordered(write.thread, write.clock, me)) {
    report("race", thread, address, site, write.thread, write.site);
  }
  Reads& reads = reads_[std::size_t(cell) * num_warps_ + me / 32];
  const u32 now = clocks_[me][me];
  if (reads.clock != now) {  // lanes of a warp keep equal time unless one alone has released something
    reads.clock = now;
    reads.lanes = 0;
  }
  reads.lanes |= thread.bit();
  reads.site = site;
}

void RaceDetector::check_write(Thread& thread, int cell, u32 address, bool in_flight, Site site) {
  const int me = thread.id;
  Write& write = writes_[cell];
  if (write.in_flight) {
    report("copy-not-awaited", thread, address, site, write.thread, write.site);
  } else if (write.clock && !ordered(write.thread, write.clock, me)) {
    report("race", thread, address, site, write.thread, write.site);
  }
  Reads* reads = &reads_[std::size_t(cell) * num_warps_];
  for (int w = 0; w < num_warps_; ++w) {
    for (u32 lanes = reads[w].lanes; lanes; lanes &= lanes - 1) {
      const int reader = w * 32 + __builtin_ctz(lanes);
      if (ordered(reader, reads[w].clock, me)) continue;
      report("race", thread, address, site, reader, reads[w].site);
      break;
    }
    reads[w].lanes = 0;
  }
  write.clock = clocks_[me][me];
  write.thread = static_cast<std::uint16_t>(me);
  write.in_flight = in_flight;
  write.site = site;
}

void RaceDetector::report(const char* kind, Thread& thread, u32 address, Site site, int other, Site other_site) {
  cufa_host::report(*block_, kind, site, other_site, [&] {
    const std::string where = "shared offset " + std::to_string(address) + ", " + describe(thread) + " at " + describe(site);
    if (other < 0) return "read of shared memory that nothing has written: " + where;
    const std::string whom =
        "warp " + std::to_string(other / 32) + " lane " + std::to_string(other % 32) + " at " + describe(other_site);
    if (kind[0] == 'c') return "touches data of a cp.async that was not waited for: " + where + "; issued by " + whom;
    return "no barrier orders this access after another thread's: " + where + "; the other is " + whom;
  });
}

}  // namespace cufa_host
