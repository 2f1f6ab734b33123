// A block: its threads, and the order in which its warps run.
#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

Block::Block(Cluster& c, int r)
    : cluster(c),
      rank(r),
      launch(c.launch),
      num_threads(c.launch.num_threads),
      num_warps(c.launch.num_threads / 32),
      checked(c.launch.mode == kChecked),
      counted(c.launch.mode == kCounted),
      warps(num_warps),
      races(c.clocks) {
  for (int i = 0; i < num_threads; ++i) threads.push_back(new Thread);
  shared = static_cast<unsigned char*>(::operator new(launch.shared_bytes + 1024, std::align_val_t(1024)));
}

Block::~Block() {
  for (Thread* thread : threads) delete thread;
  ::operator delete(shared, std::align_val_t(1024));
}

void Block::start(u32 linear) {
  const u32* grid = launch.grid;
  index = {linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]};
  counters = {};
  clock_seen = 0;
  random_state = (u64(launch.seed) << 32 | linear) * 0x9e3779b97f4a7c15ull | 1;
  std::fill(shared, shared + launch.shared_bytes, 0xff);  // NaN in every format
  for (Barrier& barrier : barriers) barrier = {0, 0, {}, VectorClock(cluster.clocks.size)};
  for (int w = 0; w < num_warps; ++w) {
    Warp& warp = warps[w];
    warp.index = w;
    warp.ready = warp.alive = kAllLanes;
    warp.arrived = 0;
    warp.cluster_phase = 0;
    warp.cluster_pending = false;
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
    t.number = rank * num_threads + i;
    t.done = false;
    t.copies.clear();
    t.stores.clear();
    t.additions.clear();
    t.additions_read.clear();
    t.wgmma_registers.clear();
    t.polled = nullptr;
    t.fiber.start(thread_main, i);
  }
  start_registers(*this);
  mbarriers.clear();
  polling.clear();
  bulk_copies.clear();
  remote_stores.clear();
  if (checked) races.reset(*this);
}

bool Block::sweep() {
  bool progress = false;
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
    if (failed) break;
  }
  return progress;
}

bool Block::ready() const {
  return std::any_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.ready != 0; });
}

bool Block::alive() const {
  return std::any_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.alive != 0; });
}

}  // namespace cufa_host
