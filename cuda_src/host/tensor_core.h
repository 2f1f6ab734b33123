// The tensor cores: each lane queues its share of a product; the warp executes them together.
#pragma once
#include <vector>

#include "host/primitives_host.h"

namespace cufa_host {

struct Block;
struct Warp;

class ProductQueue {
 public:
  // `guard`: keep D and leave poison in its place until the product is executed. A kernel that forgets mma_fence() then computes
  // NaN, or is reported when it writes.
  void push(int lane, Format format, float* d, const u32* a, u32 b0, u32 b1, bool guard, Site site);
  // All lanes are at a common point: multiply in order.
  void execute(Block& block, Warp& warp);
  void clear() {
    for (u32& n : count_) n = 0;
  }

 private:
  // One warp-wide mma. A register of all lanes is, in lane order, an 8x8 matrix (8x4 for tf32, 8x16 for e4m3) row by row. B is
  // stored with its two lane coordinates exchanged, which transposes it for free.
  struct Entry {
    alignas(64) u32 a[4][32];
    u32 b[2][32];
    float* d[32];
    float kept[32][4];  // D of the lanes in `first`
    u32 first;          // guarded: lanes for which this is the first product queued for its D
    Format format;
    Site site;
  };
  static void restore(Block& block, Warp& warp, const Entry& entry);
  template <typename Element>
  static void multiply(Block& block, const Entry& entry);

  std::vector<Entry> entries_;  // grows to the longest run between two collectives
  u32 count_[32] = {};          // queued by each lane
};

}  // namespace cufa_host
