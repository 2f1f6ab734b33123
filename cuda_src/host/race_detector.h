// Data races inside a block, on shared and on global memory, by vector clocks (FastTrack: Flanagan and Freund, PLDI
// 2009), so that a race is found whether or not this run's order of threads made it give a wrong answer.
//
// Every thread keeps a vector clock; a barrier joins those of its participants. Of every piece of memory we keep the
// last write and, for each warp, the last reads. Pieces are 16 bytes, what cp.async and ldmatrix move, and
// are split into eight of 2 bytes when a narrower access comes.
//
// The clocks are those of all threads of a cluster of blocks, the memory that of one block: a store from another block
// is a write like any other, ordered by what orders threads of two blocks: the cluster's barrier, and for st.async the
// mbarrier that it counts on. (Not seen: an earlier store of the same thread that only a later st.async's mbarrier seems
// to order.)
//
// A store by the copy engine reads shared memory from when it is issued until its thread has waited for it: nobody may write
// there meanwhile.
//
// wgmma and the copy engine reach shared memory by a way of their own (the async proxy). What ordinary instructions read
// or wrote comes before what these write, or read, only with fence.proxy.async between the two: a clock also holds how
// much of every thread's past has been fenced.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "host/findings.h"
#include "primitives/types.cuh"

namespace cufa_host {

struct Thread;
struct Block;
struct Mbarrier;

class VectorClock {
 public:
  explicit VectorClock(int size = 0) : time_(size, 0) {}
  u32& operator[](int thread) { return time_[thread]; }
  u32 operator[](int thread) const { return time_[thread]; }
  void clear(int size) {
    time_.assign(size, 0);
    fenced_.clear();
  }
  // Up to when accesses of `thread` are ordered with the async proxy's too. Empty, and free of cost, before any fence.
  u32 fenced(int thread) const { return fenced_.empty() ? 0 : fenced_[thread]; }
  void fence(int thread, u32 now) {
    fenced_.resize(time_.size());
    for (std::size_t i = 0; i < time_.size(); ++i) fenced_[i] = fenced_[i] > time_[i] ? fenced_[i] : time_[i];
    fenced_[thread] = now;
  }
  void join(const VectorClock& other) {
    u32* mine = time_.data();
    const u32* theirs = other.time_.data();
    for (std::size_t i = 0, n = time_.size(); i < n; ++i) mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
    if (other.fenced_.empty()) return;
    fenced_.resize(time_.size());
    for (std::size_t i = 0; i < fenced_.size(); ++i) {
      fenced_[i] = fenced_[i] > other.fenced_[i] ? fenced_[i] : other.fenced_[i];
    }
  }

 private:
  std::vector<u32> time_, fenced_;
};

// proxy_*: by wgmma and the copy engine. atomic: of a counter in global memory; sum: a float32 addition there, whose rounding
// depends on the order; async_sum: one that the copy engine is still busy with. These never race with one another, but with
// loads and stores.
enum class Access { read, write, async_write, proxy_read, proxy_write, atomic, sum, async_sum };
inline bool is_sum(Access kind) { return kind == Access::sum || kind == Access::async_sum; }
inline bool is_atomic(Access kind) { return kind == Access::atomic || is_sum(kind); }
inline bool is_read(Access kind) { return kind == Access::read || kind == Access::proxy_read; }

// Of the threads of all blocks of a cluster.
struct ClusterClocks {
  void reset(int num_threads);
  // Entries beside the threads': completed phases of the cluster's barrier; 1 once the launch before is known to be over.
  int phases() const { return size - 2; }
  int previous_grid() const { return size - 1; }
  int size = 0;
  std::vector<VectorClock> of;  // each thread: what has happened before
  std::vector<u32> time;        // of each warp: goes on when one of its lanes has released something
};

class RaceDetector {
 public:
  explicit RaceDetector(ClusterClocks& clocks) : clocks_(clocks) {}
  void reset(Block& block);

  void access(Thread& thread, u32 smem, u32 bytes, Access kind, Site site);
  // Of an array that this launch may write; others cannot race.
  void access_global(Thread& thread, const void* global, u32 bytes, Access kind, Site site);
  // An asynchronous write of this thread has landed, and the thread knows.
  void complete(Thread& thread, u32 smem, u32 bytes);

  // The copy engine reads shared memory for a store, from when it is issued until this thread has waited for it.
  void begin_sending(Thread& thread, u32 smem, u32 bytes, Site site);
  void end_sending(Thread& thread, u32 smem, u32 bytes, Site site);
  // The 16 bytes at `smem` are a copy of global memory that another block may have been writing: nobody may read them.
  void taint(u32 smem, const void* global, Site site);
  // Before the copy engine counts on an mbarrier: its initialisation must be seen by it.
  void check_initialised(Thread& thread, u32 address, const Mbarrier& barrier, Site site);

  // What happened before in `thread` is published to `clock`; what `clock` holds happened before what follows.
  void release(Thread& thread, VectorClock& clock);
  void acquire(Thread& thread, const VectorClock& clock) { clocks_.of[number(thread)].join(clock); }
  // Before a store of another block's thread to this block: false, with a finding, when it must not be made. Remembers
  // it until this block has ended.
  bool can_store(Thread& thread, Site site);
  // The thread, of another block, knows that the mbarrier was initialised.
  bool knows(const Thread& thread, const Mbarrier& barrier) const;
  // A thread of this block has left the kernel.
  void leave(Thread& thread);

  // fence.proxy.async, by this thread: for all that has happened before.
  void fence_proxies(Thread& thread);

  // The asynchronous write has landed without the thread knowing: whoever acquires `clock` sees it (mbarrier).
  void publish_copy(Thread& thread, u32 smem, u32 bytes, VectorClock& clock);

 private:
  static constexpr int kParts = 8;  // of a 16-byte chunk
  static constexpr u32 kChunkBytes = 16, kPartBytes = 2;
  // Set in addresses of arrays: programs that are not position-independent have some within 32 bits, as shared memory is.
  static constexpr u64 kGlobal = u64(1) << 63;

  struct Write {
    u32 clock = 0;  // 0: never written
    u16 thread = 0;
    bool in_flight = false, by_proxy = false;
    Site site = {"", 0};
  };
  struct Reads {  // or additions, by the lanes of one warp, at one time of theirs
    u32 clock = 0;
    u32 lanes = 0;
    bool by_proxy = false;
    Site site = {"", 0};
  };

  struct Sending {  // by the copy engine, of one chunk
    int chunk, thread;
    Site site;
  };
  struct Taint {
    const void* global;
    Site site;
  };
  struct Sent {  // the latest of a thread
    u32 clock;
    Site site;
  };

  static int number(const Thread& thread);
  bool ordered(int earlier, u32 clock, int now) const { return earlier == now || clocks_.of[now][earlier] >= clock; }
  std::string describe_thread(int number) const;
  // One access to (part of) one 16-byte chunk, whose cell is known. `address` says which bytes.
  void access_chunk(Thread& thread, int chunk, u64 address, u32 bytes, Access kind, Site site);
  void check_read(Thread& thread, int cell, u64 address, bool by_proxy, Site site);
  void check_write(Thread& thread, int cell, u64 address, Access kind, Site site);
  void check_sending(Thread& thread, int chunk, u64 address, Site site);
  void check_taint(Thread& thread, int chunk, u64 address, Access kind, Site site);
  void check_atomic(Thread& thread, int cell, u64 address, Access kind, Site site);
  void note(Reads& reads, const Thread& thread, bool by_proxy, Site site);
  // Whether the accesses of every warp come before one that the thread makes now; reports one that does not.
  void check_order(const Reads* by_warp, Thread& thread, u64 address, bool by_proxy, Site site,
                   const char* unordered = "race");
  void check_warp(const Reads& reads, int warp, Thread& thread, u64 address, bool by_proxy, Site site,
                  const char* unordered);
  int add_cell(int like);
  void report(const char* kind, Thread& thread, u64 address, Site site, int other, Site other_site);

  Block* block_ = nullptr;
  int num_warps_ = 0;
  ClusterClocks& clocks_;
  std::vector<Write> writes_;                   // of each cell: the chunks of shared memory come first
  std::vector<Reads> reads_;                    // (cell, warp)
  std::unordered_map<int, std::vector<Reads>> additions_;  // since the last write, by cell and warp
  std::vector<int> first_part_;                 // of a cell that is a chunk: the cell of its first 2-byte part, or -1
  std::vector<Sending> sending_;
  std::vector<u16> is_sent_;                    // by chunk: how often in sending_
  std::unordered_map<int, Taint> tainted_;      // by chunk
  std::unordered_map<u64, int> global_chunks_;  // address / 16 -> cell
  std::unordered_map<int, Sent> remote_;         // stores from other blocks, by thread
  VectorClock left_;                             // what happened before the threads left that have left
};

}  // namespace cufa_host
