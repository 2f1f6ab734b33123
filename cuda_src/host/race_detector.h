// Data races on shared memory by vector clocks (FastTrack: Flanagan and Freund, PLDI 2009), so that a race is found
// whether or not this run's order of threads made it give a wrong answer.
//
// Every thread keeps a vector clock; a barrier joins those of its participants. Of every piece of shared memory we
// keep the last write and, for each warp, the last reads. Pieces are 16 bytes, what cp.async and ldmatrix move, and
// are split into eight of 2 bytes when a narrower access comes.
#pragma once
#include <cstdint>
#include <vector>

#include "host/findings.h"

namespace cufa_host {

struct Thread;
struct Block;

class VectorClock {
 public:
  explicit VectorClock(int size = 0) : time_(size, 0) {}
  std::uint32_t& operator[](int thread) { return time_[thread]; }
  std::uint32_t operator[](int thread) const { return time_[thread]; }
  void clear(int size) { time_.assign(size, 0); }
  void join(const VectorClock& other) {
    std::uint32_t* mine = time_.data();
    const std::uint32_t* theirs = other.time_.data();
    for (std::size_t i = 0, n = time_.size(); i < n; ++i) mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
  }

 private:
  std::vector<std::uint32_t> time_;
};

enum class Access { read, write, async_write };

class RaceDetector {
 public:
  void reset(Block& block, std::uint32_t shared_bytes, int num_threads);

  void access(Thread& thread, std::uint32_t address, std::uint32_t bytes, Access kind, Site site);
  // An asynchronous write of this thread has landed, and the thread knows.
  void complete(Thread& thread, std::uint32_t address, std::uint32_t bytes);

  // What happened before in `thread` is published to `clock`; what `clock` holds happened before what follows.
  void release(Thread& thread, VectorClock& clock);
  void acquire(Thread& thread, const VectorClock& clock) { clocks_[thread_id(thread)].join(clock); }

 private:
  struct Write {
    std::uint32_t clock = 0;  // 0: never written
    std::uint16_t thread = 0;
    bool in_flight = false;
    Site site = {"", 0};
  };
  struct Reads {  // by the lanes of one warp, at one time of theirs
    std::uint32_t clock = 0;
    std::uint32_t lanes = 0;
    Site site = {"", 0};
  };

  static int thread_id(const Thread& thread);
  bool ordered(int earlier, std::uint32_t clock, int now) const {
    return earlier == now || clocks_[now][earlier] >= clock;
  }
  void check_read(Thread& thread, int cell, std::uint32_t address, Site site);
  void check_write(Thread& thread, int cell, std::uint32_t address, bool in_flight, Site site);
  void split(int chunk);
  void report(const char* kind, Thread& thread, std::uint32_t address, Site site, int other, Site other_site);

  Block* block_ = nullptr;
  int num_warps_ = 0, num_chunks_ = 0;
  std::vector<VectorClock> clocks_;  // of each thread
  std::vector<Write> writes_;        // of each cell: the chunks, then groups of eight for split chunks
  std::vector<Reads> reads_;         // (cell, warp)
  std::vector<int> first_part_;      // of each chunk: cell of its first 2-byte part, or -1
};

}  // namespace cufa_host
