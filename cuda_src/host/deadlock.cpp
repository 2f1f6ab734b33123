// Says what each thread waits for when none can go on; and setmaxnreg, by which warps of a block trade registers.
#include "primitives/register_budget.cuh"

#include "host/runtime.h"

namespace cufa_host {
namespace {

std::string lanes_text(u32 lanes) {
  if (lanes == kAllLanes) return "all lanes";
  std::string text = __builtin_popcount(lanes) == 1 ? "lane" : "lanes";
  for (const char* separator = " "; lanes; separator = ", ") {
    const int first = lowest(lanes);
    int last = first;
    while (last < 31 && (lanes >> (last + 1) & 1)) ++last;
    text += text_of(separator, first);
    if (last > first) text += text_of("-", last);
    lanes &= last == 31 ? 0 : ~0u << (last + 1);
  }
  return text;
}

// "; warp 4 asks for 240 registers per thread and has 168; of the 12 x 168 that the launch has 0 are free", or nothing.
std::string registers_text(const Block& block) {
  std::string text;
  for (const Warp& warp : block.warps) {
    if (warp.registers == warp.registers_asked) continue;
    text += text_of("; warp ", warp.index, " asks for ", warp.registers_asked, " registers per thread and has ", warp.registers);
  }
  if (text.empty()) return text;
  return text_of(text, "; of the ", block.num_warps, " x ", registers_at_launch(block.num_threads), " that the launch has ",
                 block.free_registers, " are free");
}

const Collective kSetRegisters = {"setmaxnreg", [](Block&, Warp&) {}, true};

}  // namespace

std::string who_waits(Block& block) {
  std::string text;
  for (Warp& warp : block.warps) {
    u32 rest = kAllLanes;
    text += text_of("; warp ", warp.index);
    while (rest) {
      const Thread& first = block.thread(warp, lowest(rest));
      u32 same = 0;
      for (u32 lanes = rest; lanes; lanes &= lanes - 1) {
        const Thread& other = block.thread(warp, lowest(lanes));
        const bool alike = other.waits_for == first.waits_for && (first.done || other.waits_at.line == first.waits_at.line);
        if (alike) same |= other.bit();
      }
      text += (rest == kAllLanes ? " " : ", ") + lanes_text(same);
      text += first.done ? " left the kernel" : text_of(" wait for ", first.waits_for, " at ", first.waits_at);
      rest &= ~same;
    }
  }
  for (int id = 0; id < kNumBarriers; ++id) {
    const Barrier& barrier = block.barriers[id];
    if (barrier.arrived) text += text_of("; barrier ", id, " has ", barrier.arrived, " of ", barrier.expected, " threads");
  }
  text += registers_text(block);
  for (const Thread* thread : block.polling) {
    text += text_of("; the counter at ", global_place(block.launch, thread->polled, 4), " stays at ", thread->polled_count);
  }
  return text.substr(2);
}

void start_registers(Block& block) {
  for (Warp& warp : block.warps) warp.registers = warp.registers_asked = registers_at_launch(block.num_threads);
  block.free_registers = 0;
  block.awaiting_registers.clear();
}

void set_registers(int count, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  rendezvous(thread, kSetRegisters, site);
  warp.registers_asked = count;
  while (warp.registers != count) {  // the first lane that finds enough registers takes or gives back for all lanes
    if (count - warp.registers > block.free_registers) {
      block.awaiting_registers.push_back(&thread);
      park(thread, "registers", site);
      continue;
    }
    block.free_registers -= count - warp.registers;
    warp.registers = count;
    resume(block.awaiting_registers);
  }
}

}  // namespace cufa_host
