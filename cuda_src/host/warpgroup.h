// wgmma: asynchronous products of a warpgroup, queued by each lane, executed warp by warp when they are waited for.
#pragma once
#include <vector>

#include "host/hopper_host.h"

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
    WarpgroupProduct shared;  // of lane 0; the others differ in `a` and `d`
    u32 a[4][32];
    const u32* a_registers[32];
    float* d[32];
    std::vector<float> kept[32];  // D, while poison lies in its place (checked mode, first product of a chain)
    Site site;
  };
  void run(Block& block, Warp& warp, Entry& entry);
  // Checked: nobody has touched the registers of a lane meanwhile, and they are the thread's own again.
  static void check_registers(Thread& thread, const Entry& entry);
  std::vector<Entry> entries_;  // oldest first
  std::vector<u32> groups_;     // sizes of committed groups, by lane 0's count
  u32 count_[32] = {};          // entries of each lane
  u32 commits_[32] = {};        // groups of each lane
  u32 committed_ = 0;           // entries in groups
};

}  // namespace cufa_host
