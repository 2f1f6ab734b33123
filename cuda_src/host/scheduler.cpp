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

namespace {

// Go on with another lane of this warp, or with the scheduler when there is none.
void leave(Thread& thread) {
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

}  // namespace

void thread_main() {
  Thread& thread = current();
  thread.block->launch.entry(thread.block->launch.arguments);
  Warp& warp = *thread.warp;
  for (const PendingCopy& copy : thread.copies.in_flight()) {
    if (!copy.global) continue;  // zeros: nothing was read for nothing
    report(*thread.block, "copy-in-flight", {"", 0}, {"", 0},
           [&] { return "kernel ends with cp.async still in flight: " + describe(thread); });
    break;
  }
  if (!thread.stores.in_flight().empty()) {
    const Site site = thread.stores.in_flight().front().site;
    report(*thread.block, "copy-in-flight", site, {"", 0}, [&] {
      return "kernel ends with a store by the copy engine that may not have read its shared memory yet, never committed or "
             "never waited for: " + describe(thread) + " at " + describe(site);
    });
  }
  if (!warp.warpgroup.empty()) {
    report(*thread.block, "copy-in-flight", {"", 0}, {"", 0},
           [&] { return "kernel ends with wgmma still in flight: " + describe(thread); });
  }
  end_additions(thread);
  thread.done = true;
  thread.waits_for = "left the kernel";
  warp.alive &= ~thread.bit();
  warp.ready &= ~thread.bit();
  if (thread.block->cluster.size() > 1) leave_cluster(thread);
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
  return describe(thread.block_index) + " warp " + std::to_string(thread.id / 32) + " lane " +
         std::to_string(thread.lane);
}

std::string describe(Index3 i) {
  return "block (" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

void park(Thread& thread, const char* waits_for, Site site) {
  thread.waits_for = waits_for;
  thread.waits_at = site;
  thread.warp->ready &= ~thread.bit();
  leave(thread);
}

void rendezvous(Thread& thread, const Collective& collective, Site site) {
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  if (!warp.arrived) {
    warp.collective = &collective;
    warp.site = site;
  } else if (warp.collective != &collective || (collective.aligned && warp.site.line != site.line)) {
    abandon(block, "divergence", site,
            describe(thread) + " is at " + collective.name + " (" + describe(site) + ") while other lanes wait at " +
                warp.collective->name + " (" + describe(warp.site) + "): all 32 lanes must reach it together");
  }
  warp.arrived |= thread.bit();
  if (warp.arrived != kAllLanes) return park(thread, collective.name, site);
  warp.arrived = 0;
  warp.products.execute(block, warp);
  if (block.counted) warp.log.flush(block.counters);
  collective.execute(block, warp);
  warp.ready = kAllLanes;
}

void abandon(Block& block, const char* kind, Site site, const std::string& message) {
  report(block, kind, site, {"", 0}, [&] { return message; });
  block.failed = true;
  Thread& thread = current();
  context = nullptr;
  thread.fiber.switch_to(block.scheduler);
  __builtin_unreachable();
}

}  // namespace cufa_host
