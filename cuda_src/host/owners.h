// Races between blocks: which thread last wrote, read or added to each element of the arrays that a launch may write.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "host/cluster.h"
#include "host/launch.h"
#include "host/race_detector.h"

namespace cufa_host {

// By cluster: the latest clock of its threads that this thread has learned.
using Knowledge = std::map<u32, std::shared_ptr<const VectorClock>>;

// The clusters of a launch run in no order. If a thread writes an element, threads of other clusters may touch it only if they
// learned of the write from a counter. The writer, or a thread that a barrier orders after the writer, adds to the counter
// (atom.inc, red.release). Then the other thread, or a thread that a barrier orders before it, reads the counter (atom.inc,
// ld.acquire). Blocks of one cluster are also ordered by its barrier, through their common clocks.
//
// Additions to an element (red, atom) race with loads and stores only. If the addition order is fixed (CufaLaunch::ordered_sums),
// also with one another.
//
// One reader of an element is kept. A later reader replaces it only if ordered after it; else the later reader is dropped, and
// a race with the dropped reader may be missed.
class Owners {
 public:
  explicit Owners(const CufaLaunch& launch);
  // Reports a race. If the racing access is the copy engine's read (proxy_read), returns false instead: the race counts only if
  // the copy is read.
  bool access(Thread& thread, int array, const void* global, u32 bytes, Access kind, Site site);

  // atom.inc, red.release and ld.acquire.
  u32 count_in(Thread& thread, u32* counter, u32 last);
  void release(Thread& thread, u32* counter, u32 value);
  u32 load(Thread& thread, const u32* counter);

 private:
  // A mark: a thread's access as 64 bits (cluster + 1, number in the cluster, time), or kSums and an index of `additions_`.
  static constexpr int kThreadBits = 14, kTimeBits = 25;
  static constexpr u64 kSums = 1ull << 63, kLastTime = (1ull << kTimeBits) - 1;
  static u32 cluster_of(u64 mark) { return u32(mark >> (kThreadBits + kTimeBits)) - 1; }
  static int number_of(u64 mark) { return int(mark >> kTimeBits & ((1 << kThreadBits) - 1)); }

  struct Lesson {  // what a thread learned from a counter, and when
    int thread;
    u32 time;
    std::shared_ptr<const Knowledge> learned;
  };
  struct Addition {
    u64 mark, before;  // `before`: the addition before, as kSums | index, or 0
  };
  struct Element {
    std::atomic<u64> written, read;
  };

  u32 cluster_of(const Thread& thread) const;
  u32 block_of(u64 mark) const { return cluster_of(mark) * launch_.cluster + number_of(mark) / launch_.num_threads; }
  bool same_block(const Thread& thread, u64 mark) const;
  // Whether the access comes before the thread's present access.
  bool ordered(const Thread& thread, u64 mark) const;
  static bool knows(const Thread& thread, const Lesson& lesson);
  // Called with the lock held.
  void hand(Thread& thread, const u32* counter);
  void take(Thread& thread, const u32* counter);
  // The new owner of an element after an addition by the thread that `mark` names.
  u64 with_addition(u64 owner, u64 mark);
  // A block whose write or addition does not come before the thread's present access; ~0 when there is none.
  u32 unordered_writer(const Thread& thread, u64 owner);

  const CufaLaunch& launch_;
  const u64 launch_number_;
  std::vector<std::unique_ptr<Element[]>> elements_;  // of each array
  std::mutex counting_;
  std::vector<std::vector<Lesson>> lessons_;  // of each cluster, oldest first
  std::unordered_map<const u32*, std::shared_ptr<const Knowledge>> handed_;
  std::mutex adding_;
  std::deque<Addition> additions_;
  std::map<std::pair<u64, u64>, u64> known_additions_;  // by `before` and mark
};

}  // namespace cufa_host
