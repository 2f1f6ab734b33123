// Races between blocks: which block has written each element of the arrays that a launch may write.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "host/cluster.h"
#include "host/launch.h"
#include "host/race_detector.h"

namespace cufa_host {

// No order holds between the blocks of a launch, so an element that one block writes no other may touch, unless it
// learned of the write from a counter (atom.inc) that both counted up, the writer first, or both have met at the
// barrier of their cluster. (Found for the order in which
// this run's blocks happened to come: a read before the other block's write goes unseen.)
class Owners {
 public:
  explicit Owners(const CufaLaunch& launch);
  void access(Thread& thread, int array, const void* global, u32 bytes, Access kind, Site site);

  // atom.inc, checked: what its block wrote before is handed to the blocks that count up the same counter later.
  u32 count_in(Thread& thread, u32* counter, u32 last);
  // Blocks of a cluster have met at its barrier: each knows of all that the others have written.
  void meet(const Cluster& cluster);

 private:
  u32 number(Index3 block) const;

  const CufaLaunch& launch_;
  std::vector<std::unique_ptr<std::atomic<u64>[]>> owner_;  // of each array: (block + 1) << 32 | its time, or 0
  std::mutex counting_;
  std::vector<std::vector<u32>> seen_;                        // by a block, of each block: times before this one
  std::unordered_map<const u32*, std::vector<u32>> handed_;  // by a counter, likewise
};

}  // namespace cufa_host
