// Registers that wgmma reads and writes by itself, checked mode: accumulators, and operands held in registers.
//
// A thread's own accesses to them and wgmma's are ordered by two things only: by waiting for the product, and by
// wgmma.fence, which goes between the thread's accesses and the next product. (A product that adds to what one in flight
// is adding to needs neither.) So there must be a fence since these registers were handed back, and their contents must be
// what they were at the last one. (Not seen: a thread that only reads them after the fence.)
#pragma once
#include <unordered_map>
#include <vector>

#include "host/hopper_host.h"

namespace cufa_host {

struct Thread;

class WgmmaRegisters {
 public:
  void clear();
  void fence();  // wgmma.fence
  // A product begins to use `count` registers.
  void use(Thread& thread, const void* registers, u32 count, Site site);
  // One that did has been waited for.
  void hand_back(const void* registers);

 private:
  struct Range {
    u32 count = 0;
    u32 products = 0;         // in flight
    u32 back_at = 0;          // how many fences there had been when it was handed back last
    std::vector<u32> fenced;  // contents at the last fence; empty: none yet, or a product owned it
  };
  std::unordered_map<const u32*, Range> ranges_;  // by the first register
  u32 fences_ = 0;
};

}  // namespace cufa_host
