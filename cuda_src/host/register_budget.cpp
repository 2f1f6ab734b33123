// setmaxnreg: the warps of a block trade the registers that its launch allocated.
#include "primitives/register_budget.cuh"

#include "host/runtime.h"

namespace cufa_host {
namespace {

const Collective kSetRegisters = {"setmaxnreg", [](Block&, Warp&) {}, true};

}  // namespace

void set_registers(int count, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  rendezvous(thread, kSetRegisters, site);
  warp.registers_asked = count;
  while (warp.registers != count) {  // the first lane that finds enough of them takes or gives back for all
    if (count - warp.registers > block.free_registers) {
      block.awaiting_registers.push_back(&thread);
      park(thread, "registers", site);
      continue;
    }
    block.free_registers -= count - warp.registers;
    warp.registers = count;
    for (Thread* other : block.awaiting_registers) other->warp->ready |= other->bit();
    block.awaiting_registers.clear();
  }
}

void start_registers(Block& block) {
  for (Warp& warp : block.warps) warp.registers = warp.registers_asked = registers_at_launch(block.num_threads);
  block.free_registers = 0;
  block.awaiting_registers.clear();
}

std::string registers_text(const Block& block) {
  std::string text;
  for (const Warp& warp : block.warps) {
    if (warp.registers == warp.registers_asked) continue;
    text += "; warp " + std::to_string(warp.index) + " asks for " + std::to_string(warp.registers_asked) +
            " registers per thread and has " + std::to_string(warp.registers);
  }
  if (text.empty()) return text;
  const int at_launch = registers_at_launch(block.num_threads);
  return text + "; of the " + std::to_string(block.num_warps) + " x " + std::to_string(at_launch) +
         " that the launch has " + std::to_string(block.free_registers) + " are free";
}

}  // namespace cufa_host
