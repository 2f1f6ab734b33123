// A thread block cluster: the blocks that run together. One block, unless the launch asks for more.
#pragma once
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/launch.h"
#include "host/race_detector.h"

namespace cufa_host {

class Findings;
class Owners;

// barrier.cluster. A phase completes when every warp of the cluster has arrived or left the kernel; the barrier is `.aligned`: a
// warp's lanes arrive together.
struct ClusterBarrier {
  u32 phase = 0;                 // number of completed phases
  VectorClock arrived;           // released by the present phase's arrivals
  VectorClock completed;         // acquired by a waiter of the last completed phase
  std::vector<Thread*> waiting;  // parked
};

// One CPU thread executes one cluster after another in the same blocks.
struct Cluster {
  Cluster(const CufaLaunch& launch, Findings& findings, Owners& owners, int worker);
  ~Cluster();
  Cluster(const Cluster&) = delete;

  // `first`: index of the cluster's first block in the grid.
  void start(u32 first);
  // Run until all threads have left the kernel, or none can go on. `waiting`: threads wait for counters in global memory, which
  // another cluster may change.
  enum class State { ended, waiting, failed };
  State run();
  // Resume the threads whose counter has changed; false when there is none.
  bool wake();
  // Report a deadlock or a divided warp.
  void report_stuck();

  int size() const { return static_cast<int>(blocks.size()); }
  // Complete the barrier's phase if no warp is missing: called when a warp has arrived, or left the kernel.
  void complete_phase();

  const CufaLaunch& launch;
  Findings& findings;
  Owners& owners;
  const int worker;
  ClusterClocks clocks;
  ClusterBarrier barrier;
  std::unordered_map<const u32*, VectorClock> counters;  // by counter in global memory: the past that additions have released
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
};

}  // namespace cufa_host
