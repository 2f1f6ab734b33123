#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

thread_local ThreadContext* context = nullptr;

namespace {

int lowest(u32 mask) { return __builtin_ctz(mask); }
int highest(u32 mask) { return 31 - __builtin_clz(mask); }

int pick_lane(Block& block, u32 ready) {
  if (block.launch.schedule == kAscending) return lowest(ready);
  if (block.launch.schedule == kDescending) return highest(ready);
  for (u32 skip = random_number(block) % __builtin_popcount(ready); skip > 0; --skip) ready &= ready - 1;
  return lowest(ready);
}

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

// First frame of every fiber.
void thread_main() {
  Thread& thread = current();
  thread.block->launch.entry(thread.block->launch.arguments);
  Warp& warp = *thread.warp;
  for (const PendingCopy& copy : thread.copies) {
    if (!copy.global) continue;  // zeros: nothing was read for nothing
    report(*thread.block, "copy-in-flight", {"", 0}, {"", 0},
           [&] { return "kernel ends with cp.async still in flight: " + describe(thread); });
    break;
  }
  if (!warp.warpgroup.empty()) {
    report(*thread.block, "copy-in-flight", {"", 0}, {"", 0},
           [&] { return "kernel ends with wgmma still in flight: " + describe(thread); });
  }
  thread.done = true;
  thread.waits_for = "left the kernel";
  warp.alive &= ~thread.bit();
  warp.ready &= ~thread.bit();
  leave(thread);
  __builtin_unreachable();
}

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

// "warp 2 lanes 0-15 wait for ldmatrix at …, lanes 16-31 left the kernel"
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
  return text.substr(2);
}

std::string block_text(Index3 i) {
  return "block (" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

}  // namespace

u32 random_number(Block& block) {  // xorshift64
  u64& s = block.random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return static_cast<u32>(s >> 20);
}

std::string describe(const Thread& thread) {
  return block_text(thread.block_index) + " warp " + std::to_string(thread.id / 32) + " lane " +
         std::to_string(thread.lane);
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

Block::Block(const CufaLaunch& l, Findings& f, Owners& o, int w)
    : launch(l),
      findings(f),
      owners(o),
      worker(w),
      num_threads(l.num_threads),
      num_warps(l.num_threads / 32),
      checked(l.mode == kChecked),
      counted(l.mode == kCounted),
      warps(num_warps) {
  for (int i = 0; i < num_threads; ++i) threads.push_back(new Thread);
  shared = static_cast<unsigned char*>(::operator new(launch.shared_bytes + 1024, std::align_val_t(1024)));
}

Block::~Block() {
  for (Thread* thread : threads) delete thread;
  ::operator delete(shared, std::align_val_t(1024));
}

bool Block::run(u32 linear) {
  const u32* grid = launch.grid;
  index = {linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]};
  counters = {};
  random_state = (u64(launch.seed) << 32 | linear) * 0x9e3779b97f4a7c15ull | 1;
  std::fill(shared, shared + launch.shared_bytes, 0xff);  // NaN in every format
  for (Barrier& barrier : barriers) {
    barrier.arrived = 0;
    barrier.waiting.clear();
    if (checked) barrier.clock.clear(num_threads);
  }
  for (int w = 0; w < num_warps; ++w) {
    Warp& warp = warps[w];
    warp.index = w;
    warp.ready = warp.alive = kAllLanes;
    warp.arrived = 0;
    warp.products.clear();
    warp.warpgroup.clear();
  }
  for (int i = 0; i < num_threads; ++i) {
    Thread& t = *threads[i];
    t.thread_index = {u32(i), 0, 0};
    t.block_index = index;
    t.block_size = {u32(num_threads), 1, 1};
    t.grid_size = {grid[0], grid[1], grid[2]};
    t.block = this;
    t.warp = &warps[i / 32];
    t.id = i;
    t.lane = i % 32;
    t.done = false;
    t.copies.clear();
    t.group_sizes.clear();
    t.uncommitted = 0;
    t.fiber.start(thread_main, i);
  }
  mbarriers.clear();
  bulk_copies.clear();
  if (checked) races.reset(*this, launch.shared_bytes, num_threads);

  u32 alive;
  do {
    bool progress = false;
    alive = 0;
    for (int i = 0; i < num_warps; ++i) {
      int w = i;
      if (launch.schedule == kDescending) w = num_warps - 1 - i;
      if (launch.schedule == kRandom) w = random_number(*this) % num_warps;
      Warp& warp = warps[w];
      if (!warp.ready) continue;
      progress = true;
      Thread& first = thread(warp, pick_lane(*this, warp.ready));
      context = &first;
      scheduler.switch_to(first.fiber);
      if (failed) return false;
    }
    for (const Warp& warp : warps) {
      alive |= warp.alive;
      progress |= warp.ready != 0;
    }
    if (alive && !progress && land_one(*this)) progress = true;
    if (alive && !progress) {
      bool divergent = false;  // lanes at a collective that the others will never reach
      for (const Warp& warp : warps) divergent |= warp.arrived != 0;
      report(*this, divergent ? "divergence" : "deadlock", {"", 0}, {"", 0}, [&] {
        return std::string(divergent ? "a warp is divided, all 32 lanes must reach a collective together, in "
                                     : "deadlock in ") +
               block_text(index) + ": " + who_waits(*this);
      });
      return false;
    }
  } while (alive);
  if (counted) {
    for (Warp& warp : warps) warp.log.flush(counters);
  }
  return true;
}

}  // namespace cufa_host
