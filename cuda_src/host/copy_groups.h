// Asynchronous copies of one thread (cp.async, bulk stores), in groups that complete in order.
#pragma once
#include <vector>

#include "primitives/types.cuh"

namespace cufa_host {

template <typename Copy>
class CopyGroups {
 public:
  void push(const Copy& copy) {
    copies_.push_back(copy);
    ++uncommitted_;
  }
  void commit() {
    sizes_.push_back(uncommitted_);
    uncommitted_ = 0;
  }
  // f(copy) for the copies of all groups except the `pending` youngest; forgets them.
  template <typename F>
  void wait(u32 pending, F f) {
    if (sizes_.size() <= pending) return;
    const auto groups = sizes_.end() - pending;
    std::size_t landed = 0;
    for (auto size = sizes_.begin(); size != groups; ++size) landed += *size;
    for (std::size_t i = 0; i < landed; ++i) f(copies_[i]);
    copies_.erase(copies_.begin(), copies_.begin() + landed);
    sizes_.erase(sizes_.begin(), groups);
  }
  void clear() {
    copies_.clear();
    sizes_.clear();
    uncommitted_ = 0;
  }
  // Copies that were not waited for, committed or not; oldest first.
  const std::vector<Copy>& in_flight() const { return copies_; }

 private:
  std::vector<Copy> copies_;
  std::vector<u32> sizes_;  // of committed groups, oldest first; the remaining copies are not committed
  u32 uncommitted_ = 0;
};

}  // namespace cufa_host
