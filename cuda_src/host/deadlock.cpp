// Who waits for what, when nobody can go on.
#include "host/runtime.h"

namespace cufa_host {
namespace {

std::string lanes_text(u32 lanes) {
  if (lanes == kAllLanes) return "all lanes";
  std::string text = __builtin_popcount(lanes) == 1 ? "lane" : "lanes";
  while (lanes) {
    const int first = lowest(lanes);
    int last = first;
    while (last < 31 && (lanes >> (last + 1) & 1)) ++last;
    text += (text.back() == 's' || text.back() == 'e' ? " " : ", ") + std::to_string(first);
    if (last > first) text += "-" + std::to_string(last);
    lanes &= last == 31 ? 0 : ~0u << (last + 1);
  }
  return text;
}

}  // namespace

std::string who_waits(Block& block) {
  std::string text;
  for (Warp& warp : block.warps) {
    u32 rest = kAllLanes;
    text += "; warp " + std::to_string(warp.index);
    while (rest) {
      const Thread& first = block.thread(warp, lowest(rest));
      u32 same = 0;
      for (u32 lanes = rest; lanes; lanes &= lanes - 1) {
        const Thread& other = block.thread(warp, lowest(lanes));
        const bool alike =
            other.waits_for == first.waits_for && (first.done || other.waits_at.line == first.waits_at.line);
        if (alike) same |= other.bit();
      }
      text += (rest == kAllLanes ? " " : ", ") + lanes_text(same);
      text += first.done ? " left the kernel"
                         : std::string(" wait for ") + first.waits_for + " at " + describe(first.waits_at);
      rest &= ~same;
    }
  }
  for (int id = 0; id < kNumBarriers; ++id) {
    const Barrier& barrier = block.barriers[id];
    if (barrier.arrived) {
      text += "; barrier " + std::to_string(id) + " has " + std::to_string(barrier.arrived) + " of " +
              std::to_string(barrier.expected) + " threads";
    }
  }
  text += registers_text(block);
  for (const Thread* thread : block.polling) {
    text += "; the counter at " + global_place(block.launch, thread->polled, 4) + " stays at " +
            std::to_string(thread->polled_count);
  }
  return text.substr(2);
}

}  // namespace cufa_host
