// Races between blocks: which block has written, or added to, each element of the arrays that a launch may write.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "host/cluster.h"
#include "host/launch.h"
#include "host/race_detector.h"

namespace cufa_host {

// No order holds between the blocks of a launch, so an element that one block writes no other may touch, unless it
// learned of the write from a counter that both know (atom.inc; red.release and ld.acquire), the writer first, or both have
// met at the barrier of their cluster. Blocks that add to an element (red, atom) do not race with one another, only with
// those that load or store it. (Found for the order in which this run's blocks happened to come: a read before the other
// block's write goes unseen.)
class Owners {
 public:
  explicit Owners(const CufaLaunch& launch);
  void access(Thread& thread, int array, const void* global, u32 bytes, Access kind, Site site);

  // atom.inc, checked: what its block wrote before is handed to the blocks that count up the same counter later.
  u32 count_in(Thread& thread, u32* counter, u32 last);
  // red.release and ld.acquire, checked: the one hands over, the other takes.
  void release(Thread& thread, u32* counter, u32 value);
  u32 acquire(Thread& thread, const u32* counter);
  // Blocks of a cluster have met at its barrier: each knows of all that the others have written.
  void meet(const Cluster& cluster);

 private:
  static constexpr u64 kSums = 1ull << 63;

  u32 number(Index3 block) const;
  // With the lock held.
  void hand(Thread& thread, const u32* counter);
  void take(Thread& thread, const u32* counter);
  bool ordered(u32 me, u64 mark) const;
  // What an element's owner becomes when the block that `mark` names adds to it.
  u64 with_adder(u64 owner, u64 mark);
  // Whether block `me` knows of all additions; else `other` is one who added.
  bool ordered_after_sums(u32 me, u64 sums, u32& other);

  const CufaLaunch& launch_;
  const u64 launch_number_;
  // Of each array's elements: 0; (block + 1) << 32 | its time, of the last write; or kSums | the blocks that added, as an
  // index of adders_.
  std::vector<std::unique_ptr<std::atomic<u64>[]>> owner_;
  std::mutex counting_;
  std::vector<std::vector<u32>> seen_;                        // by a block, of each block: times before this one
  std::unordered_map<const u32*, std::vector<u32>> handed_;  // by a counter, likewise
  std::mutex adding_;
  std::vector<std::vector<u64>> adders_;
  std::map<std::pair<u64, u64>, u64> next_adders_;  // by owner and mark
};

}  // namespace cufa_host
