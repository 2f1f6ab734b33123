// Races between blocks: which block has written each element of the arrays that a launch may write.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "host/launch.h"
#include "host/race_detector.h"

namespace cufa_host {

// No order holds between the blocks of a launch, so an element that one block writes no other may touch. (Found for
// the order in which this run's blocks happened to come: a read before the other block's write goes unseen.)
class Owners {
 public:
  explicit Owners(const CufaLaunch& launch);
  void access(Thread& thread, int array, const void* global, u32 bytes, Access kind, Site site);

 private:
  const CufaLaunch& launch_;
  std::vector<std::unique_ptr<std::atomic<u32>[]>> owner_;  // of each array: block + 1 an element, or 0
};

}  // namespace cufa_host
