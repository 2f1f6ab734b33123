// wgmma: asynchronous products of a warpgroup, queued by each lane, executed warp by warp when they are waited for.
#pragma once
#include <unordered_map>
#include <vector>

#include "host/primitives_host.h"

namespace cufa_host {

struct Block;
struct Thread;
struct Warp;

class WarpgroupQueue {
 public:
  void push(Thread& thread, const WarpgroupProduct& product, bool guard, Site site);
  void commit(int lane);
  // All lanes wait until at most `pending` groups are in flight: execute the older ones.
  void execute(Block& block, Warp& warp, u32 pending);
  bool empty() const { return entries_.empty(); }
  void clear();

 private:
  struct Entry {
    WarpgroupProduct shared;  // of lane 0; the other lanes differ in `a` and `d`
    u32 a[4][32];
    const u32* a_registers[32];
    float* d[32];
    std::vector<float> kept[32];  // D, while poison is in its place (checked mode, first product of a chain)
    Site site;
  };
  void run(Block& block, Warp& warp, Entry& entry);
  template <typename Element>
  static void multiply(Block& block, Warp& warp, const Entry& entry);
  // Checked mode: the registers of a lane were not touched during the product; the thread owns them again.
  static void check_registers(Thread& thread, const Entry& entry);
  std::vector<Entry> entries_;  // oldest first
  std::vector<u32> groups_;     // sizes of committed groups, by lane 0's count
  u32 count_[32] = {};          // entries of each lane
  u32 commits_[32] = {};        // groups of each lane
  u32 committed_ = 0;           // entries in groups
};

// Registers that wgmma reads and writes asynchronously: accumulators, and operands in registers. Checked mode.
//
// Two things order a thread's own accesses to them with wgmma's: waiting for the product, and a wgmma.fence between the thread's
// accesses and the next product. (A product that adds to the accumulators of one in flight needs neither.) So there must be a
// fence since the registers were handed back, and their contents must be those at the last fence. Not found: a thread that only
// reads them after the fence.
class WgmmaRegisters {
 public:
  void clear();
  void fence();  // wgmma.fence
  // A product begins to use `count` registers.
  void use(Thread& thread, const void* registers, u32 count, Site site);
  // A product that used them has been waited for.
  void hand_back(const void* registers);

 private:
  struct Range {
    u32 count = 0;
    u32 products = 0;         // in flight
    u32 back_at = 0;          // number of fences when the range was last handed back
    std::vector<u32> fenced;  // contents at the last fence; empty: no fence yet, or a product owned the range
  };
  std::unordered_map<const u32*, Range> ranges_;  // by the first register
  u32 fences_ = 0;
};

}  // namespace cufa_host
