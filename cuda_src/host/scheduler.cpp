// Which fiber runs next: lanes of a warp, collectives, and the ends of threads.
#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

thread_local ThreadContext* context = nullptr;

int pick_lane(Block& block, u32 ready) {
  if (block.launch.schedule == kAscending) return lowest(ready);
  if (block.launch.schedule == kDescending) return 31 - __builtin_clz(ready);
  for (u32 skip = random_number(block) % __builtin_popcount(ready); skip > 0; --skip) ready &= ready - 1;
  return lowest(ready);
}

// Go on with another lane of this warp, or with the scheduler when there is none.
static void leave(Thread& thread) {
  Block& block = *thread.block;
  ++block.counters.switches;
  if (const u32 ready = thread.warp->ready) {
    Thread& next = block.thread(*thread.warp, pick_lane(block, ready));
    context = &next;
    thread.fiber.switch_to(next.fiber);
  } else {
    context = nullptr;
    thread.fiber.switch_to(block.scheduler);
  }
}

void thread_main() {
  Thread& thread = current();
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  block.launch.entry(block.launch.arguments);
  const auto left_in_flight = [&](const char* what) {
    report(block, "copy-in-flight", {}, {}, [&] { return text_of("kernel ends with ", what, " still in flight: ", thread); });
  };
  const auto& copies = thread.copies.in_flight();
  if (std::any_of(copies.begin(), copies.end(), [](const PendingCopy& copy) { return copy.global; })) {
    left_in_flight("cp.async");
  }
  if (!thread.stores.in_flight().empty()) {
    const Site site = thread.stores.in_flight().front().site;
    report(thread, "copy-in-flight", site,
           "kernel ends with a store by the copy engine that may not have read its shared memory yet, never committed or "
           "never waited for");
  }
  if (!warp.warpgroup.empty()) left_in_flight("wgmma");
  end_additions(thread);
  thread.done = true;
  thread.waits_for = "left the kernel";
  warp.alive &= ~thread.bit();
  warp.ready &= ~thread.bit();
  if (block.cluster.size() > 1) leave_cluster(thread);
  leave(thread);
  __builtin_unreachable();
}

u32 random_number(Block& block) {  // xorshift64
  u64& s = block.random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return static_cast<u32>(s >> 20);
}

std::string describe(const Thread& thread) {
  return text_of(thread.block_index, " warp ", thread.id / 32, " lane ", thread.lane);
}
std::string describe(Index3 i) { return text_of("block (", i.x, ",", i.y, ",", i.z, ")"); }

void park(Thread& thread, const char* waits_for, Site site) {
  thread.waits_for = waits_for;
  thread.waits_at = site;
  thread.warp->ready &= ~thread.bit();
  leave(thread);
}

void resume(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) thread->warp->ready |= thread->bit();
  waiting.clear();
}

Operand& rendezvous(Thread& thread, const Collective& collective, Site site) {
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  Operand& operand = warp.operands[thread.lane];
  if (!warp.arrived) {
    warp.collective = &collective;
    warp.site = site;
  } else if (warp.collective != &collective || (collective.aligned && warp.site.line != site.line)) {
    abandon(block, "divergence", site,
            text_of(thread, " is at ", collective.name, " (", site, ") while other lanes wait at ", warp.collective->name, " (",
                    warp.site, "): all 32 lanes must reach it together"));
  }
  warp.arrived |= thread.bit();
  if (warp.arrived != kAllLanes) {
    park(thread, collective.name, site);
    return operand;
  }
  warp.arrived = 0;
  warp.products.execute(block, warp);
  if (block.counted) warp.log.flush(block.counters);
  collective.execute(block, warp);
  warp.ready = kAllLanes;
  return operand;
}

void abandon(Block& block, const char* kind, Site site, const std::string& message) {
  report(block, kind, site, {}, [&] { return message; });
  block.failed = true;
  Thread& thread = current();
  context = nullptr;
  thread.fiber.switch_to(block.scheduler);
  __builtin_unreachable();
}

}  // namespace cufa_host
