// Races between blocks: who has last written, read or added to each element of the arrays that a launch may write.
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

// What threads of other clusters have done up to when: by cluster, the clock of its threads.
using Knowledge = std::map<u32, std::shared_ptr<const VectorClock>>;

// No order holds between the clusters of a launch, so an element that a thread writes no thread of another cluster may
// touch, unless it learned of the write from a counter: the writer, or a thread that a barrier orders after it, counted up
// (atom.inc, red.release) before the other, or a thread that a barrier orders before it, looked (atom.inc, ld.acquire).
// Blocks of one cluster meet at its barrier as well, which their common clocks know. Threads that add to an element (red,
// atom) do not race with one another, only with those that load or store it. Where the order of additions must not change
// (CufaLaunch::ordered_sums), who looks without acquiring (ld.relaxed) may add afterwards: an addition does not overtake the
// load that it depends on.
//
// Of an element's readers one is kept, a reader that nothing orders before the later ones rather than those.
class Owners {
 public:
  explicit Owners(const CufaLaunch& launch);
  // Reports a race. Of a copy engine's read (proxy_read) it returns false instead: what matters is what reads the copy.
  bool access(Thread& thread, int array, const void* global, u32 bytes, Access kind, Site site);

  // atom.inc, red.release, and ld.acquire or ld.relaxed.
  u32 count_in(Thread& thread, u32* counter, u32 last);
  void release(Thread& thread, u32* counter, u32 value);
  u32 load(Thread& thread, const u32* counter, bool acquires);

 private:
  // A thread's access as 64 bits: its cluster + 1, its number there, its time. Or kSums and an index of `additions_`.
  static constexpr int kThreadBits = 14, kTimeBits = 25;
  static constexpr u64 kSums = 1ull << 63, kLastTime = (1ull << kTimeBits) - 1;
  static u32 cluster_of(u64 mark) { return u32(mark >> (kThreadBits + kTimeBits)) - 1; }
  static int number_of(u64 mark) { return int(mark >> kTimeBits & ((1 << kThreadBits) - 1)); }

  struct Told {  // what a counter tells
    Knowledge acquired;  // what its readers see, if they acquire,
    Knowledge summed;    // and what comes before their additions in any case
  };
  struct Lesson {  // what a thread learned from one, and when
    int thread;
    u32 time;
    bool acquired;
    std::shared_ptr<const Told> told;
  };
  struct Addition {
    u64 mark, before;  // `before`: kSums | another, or 0
  };
  struct Element {
    std::atomic<u64> written, read;
  };

  u32 cluster_of(const Thread& thread) const;
  u32 block_of(u64 mark) const { return cluster_of(mark) * launch_.cluster + number_of(mark) / launch_.num_threads; }
  bool same_block(const Thread& thread, u64 mark) const;
  // Whether the access comes before what the thread does now; `adds`: before what it adds now.
  bool ordered(const Thread& thread, u64 mark, bool adds = false) const;
  static bool knows(const Thread& thread, const Lesson& lesson);
  // With the lock held.
  void hand(Thread& thread, const u32* counter);
  void take(Thread& thread, const u32* counter, bool acquire);
  // What an element's owner becomes when the thread that `mark` names adds to it.
  u64 with_addition(u64 owner, u64 mark);
  // A block whose write, or addition, nothing orders before what the thread does, or adds, now; ~0 when there is none.
  u32 unordered_writer(const Thread& thread, u64 owner, bool adds = false);

  const CufaLaunch& launch_;
  const u64 launch_number_;
  std::vector<std::unique_ptr<Element[]>> elements_;  // of each array
  std::mutex counting_;
  std::vector<std::vector<Lesson>> lessons_;  // of each cluster, oldest first
  std::unordered_map<const u32*, std::shared_ptr<const Told>> handed_;
  std::mutex adding_;
  std::deque<Addition> additions_;
  std::map<std::pair<u64, u64>, u64> known_additions_;  // by `before` and mark
};

}  // namespace cufa_host
