// Data races inside a block, on shared and on global memory, by vector clocks (FastTrack: Flanagan and Freund, PLDI 2009): a race
// is found whether or not this run's order of threads made it give a wrong answer.
//
// Every thread keeps a vector clock; a barrier joins the clocks of its participants. For every piece of memory the detector keeps
// the last write and, for each warp, the last reads. A piece has 16 bytes, as cp.async and ldmatrix move them; a narrower access
// splits it into eight of 2 bytes.
//
// The clocks belong to all threads of a cluster, the memory to one block. A store from another block is a write like any other,
// ordered by what orders threads of two blocks: the cluster's barrier, and for st.async the mbarrier that counts it. (Not found:
// an earlier store of the same thread that only a later st.async's mbarrier seems to order.)
//
// A store by the copy engine reads shared memory from its issue until its thread has waited for it: no thread may write there
// meanwhile.
//
// wgmma and the copy engine access shared memory through the async proxy. Ordinary accesses come before theirs only with a
// fence.proxy.async in between: a clock also holds how much of every thread's past has been fenced.
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
  // The time up to which accesses of `thread` are also ordered with the async proxy's. Costs nothing before the first fence.
  u32 fenced(int thread) const { return fenced_.empty() ? 0 : fenced_[thread]; }
  void fence(int thread, u32 now) {
    fenced_.resize(time_.size());
    raise(fenced_, time_);
    fenced_[thread] = now;
  }
  void join(const VectorClock& other) {
    raise(time_, other.time_);
    if (other.fenced_.empty()) return;
    fenced_.resize(time_.size());
    raise(fenced_, other.fenced_);
  }

 private:
  static void raise(std::vector<u32>& times, const std::vector<u32>& others) {
    u32* mine = times.data();
    const u32* theirs = others.data();
    for (std::size_t i = 0, n = times.size(); i < n; ++i) mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
  }
  std::vector<u32> time_, fenced_;
};

// proxy_*: accesses by wgmma and the copy engine. atomic: on a counter in global memory; sum: a float32 addition there, whose
// rounding depends on the order; async_sum: an addition that the copy engine has not finished. The last three race with loads
// and stores only.
enum class Access { read, write, async_write, proxy_read, proxy_write, atomic, sum, async_sum };
inline bool is_sum(Access kind) { return kind == Access::sum || kind == Access::async_sum; }
inline bool is_atomic(Access kind) { return kind == Access::atomic || is_sum(kind); }
inline bool is_read(Access kind) { return kind == Access::read || kind == Access::proxy_read; }

// The clocks of the threads of all blocks of a cluster.
struct ClusterClocks {
  void reset(int num_threads);
  // Entries after the threads': completed phases of the cluster's barrier; 1 once the previous launch is known to be over.
  int phases() const { return size - 2; }
  int previous_grid() const { return size - 1; }
  int size = 0;
  std::vector<VectorClock> of;  // by thread: its past
  std::vector<u32> time;        // by warp: advances when one of its lanes releases
};

class RaceDetector {
 public:
  explicit RaceDetector(ClusterClocks& clocks) : clocks_(clocks) {}
  void reset(Block& block);

  void access(Thread& thread, u32 smem, u32 bytes, Access kind, Site site);
  // Checks an access to an array that this launch may write; other arrays cannot race.
  void access_global(Thread& thread, const void* global, u32 bytes, Access kind, Site site);
  // An asynchronous write of this thread has landed, and the thread has waited for it.
  void complete(Thread& thread, u32 smem, u32 bytes);

  // The copy engine reads shared memory for a store, from when it is issued until this thread has waited for it.
  void begin_sending(Thread& thread, u32 smem, u32 bytes, Site site);
  void end_sending(Thread& thread, u32 smem, u32 bytes, Site site);
  // The 16 bytes at `smem` are a copy of global memory that another block may have been writing: no thread may read them.
  void taint(u32 smem, const void* global, Site site);
  // Before the copy engine counts on an mbarrier: it must see the barrier's initialisation.
  void check_initialised(Thread& thread, u32 address, const Mbarrier& barrier, Site site);

  // release: the past of `thread` is published to `clock`. acquire: the past in `clock` comes before what follows.
  void release(Thread& thread, VectorClock& clock);
  void acquire(Thread& thread, const VectorClock& clock);
  // Before a store of another block's thread to this block: false, with a finding, when it must not be made. Remembers the store
  // until this block has ended.
  bool can_store(Thread& thread, Site site);
  // Whether the thread, of another block, knows that the mbarrier was initialised.
  bool knows(const Thread& thread, const Mbarrier& barrier) const;
  // A thread of this block has left the kernel.
  void leave(Thread& thread);
  // fence.proxy.async by this thread, for its past.
  void fence_proxies(Thread& thread);
  // An asynchronous write has landed that its thread has not waited for. A thread that acquires `clock` sees it (mbarrier).
  void publish_copy(Thread& thread, u32 smem, u32 bytes, VectorClock& clock);

 private:
  static constexpr int kParts = 8;  // parts of a 16-byte chunk
  static constexpr u32 kChunkBytes = 16, kPartBytes = 2;
  // Set in addresses of arrays, which may otherwise look like shared addresses: programs that are not position-independent have
  // arrays below 2^32.
  static constexpr u64 kGlobal = u64(1) << 63;

  struct Write {
    u32 clock = 0;  // 0: never written
    u16 thread = 0;
    bool in_flight = false, by_proxy = false;
    Site site = {"", 0};
  };
  struct Reads {  // or additions, by lanes of one warp, at one time of the warp's clock
    u32 clock = 0, lanes = 0;
    bool by_proxy = false;
    Site site = {"", 0};
  };
  struct Sending {  // the copy engine reads one chunk for a store
    int chunk, thread;
    Site site;
  };
  struct Taint {
    const void* global;
    Site site;
  };
  struct Sent {  // the latest store of a thread to this block
    u32 clock;
    Site site;
  };

  VectorClock& of(const Thread& thread) const;
  u32& time(const Thread& thread) const;
  bool ordered(int earlier, u32 clock, int now) const { return earlier == now || clocks_.of[now][earlier] >= clock; }
  std::string describe_thread(int number) const;
  // One access to a chunk of 16 bytes or a part of it. `address` says which bytes.
  void access_chunk(Thread& thread, int chunk, u64 address, u32 bytes, Access kind, Site site);
  // Reports an access that does not come after the last write of its cell.
  void check_after_write(Thread& thread, int cell, u64 address, bool by_proxy, Site site);
  // Null if nothing was added to the cell since its last write. Shared memory is never added to.
  const std::vector<Reads>* additions_to(int cell, u64 address) const;
  void check_read(Thread& thread, int cell, u64 address, bool by_proxy, Site site);
  void check_write(Thread& thread, int cell, u64 address, Access kind, Site site);
  void check_sending(Thread& thread, int chunk, u64 address, Site site);
  void check_taint(Thread& thread, int chunk, u64 address, Access kind, Site site);
  void check_atomic(Thread& thread, int cell, u64 address, Access kind, Site site);
  void note(Reads& reads, const Thread& thread, bool by_proxy, Site site);
  // Reports an earlier access, of any warp, that does not come before an access that the thread makes now.
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
  std::vector<u16> is_sent_;                    // by chunk: how many entries of sending_ it has
  std::unordered_map<int, Taint> tainted_;      // by chunk
  std::unordered_map<u64, int> global_chunks_;  // address / 16 -> cell
  std::unordered_map<int, Sent> remote_;        // stores from other blocks, by thread
  VectorClock left_;                            // joined clocks of the threads that have left the kernel
};

}  // namespace cufa_host
