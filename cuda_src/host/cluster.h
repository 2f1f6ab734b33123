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
struct Block;
struct Thread;
struct Warp;

// barrier.cluster. A phase completes when every warp of the cluster has arrived or left the kernel; the barrier is
// `.aligned`, so that a warp's lanes come together.
struct ClusterBarrier {
  u32 phase = 0;                 // phases that have completed
  VectorClock arrived;           // what the present phase's arrivals released
  VectorClock completed;         // what a waiter of the last completed phase acquires
  std::vector<Thread*> waiting;  // parked
};

// One CPU thread executes one cluster after another in the same blocks, their warps in turn.
struct Cluster {
  Cluster(const CufaLaunch& launch, Findings& findings, Owners& owners, int worker);
  ~Cluster();
  Cluster(const Cluster&) = delete;

  // `first` is the number of its first block in the grid.
  void start(u32 first);
  // Run until all threads have left the kernel, or none can go on: then until one of the counters in global memory changes
  // that they wait for.
  enum class State { ended, waiting, failed };
  State run();
  // Threads that wait for a counter which has changed can go on.
  bool wake();
  // Nobody will ever change it.
  void report_stuck();

  int size() const { return static_cast<int>(blocks.size()); }
  void reset_barrier();
  // Complete the barrier's phase if none is missing: a warp has arrived, or left the kernel.
  void complete_phase();
  // For a deadlock's message.
  std::string who_is_missing();

  const CufaLaunch& launch;
  Findings& findings;
  Owners& owners;
  const int worker;
  ClusterClocks clocks;
  ClusterBarrier barrier;
  std::unordered_map<const u32*, VectorClock> counters;  // in global memory: what additions have released
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
};

// cluster_memory.cpp: another block's mbarrier must be known to be initialised, or there is a finding.
void check_told(Thread& thread, Block& target, const Mbarrier& barrier, u32 smem, Site site);

}  // namespace cufa_host
