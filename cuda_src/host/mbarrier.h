// mbarrier objects of a block, by their shared address.
#pragma once
#include <unordered_map>
#include <vector>

#include "host/primitives_host.h"
#include "host/race_detector.h"

namespace cufa_host {

struct Mbarrier {
  u32 arrivals = 0;       // that complete a phase
  u32 missing = 0;        // of the present phase
  i64 bytes = 0;          // announced and not landed (negative: landed before they were announced)
  u32 phase = 0;          // number of the present phase
  VectorClock arrived;    // what the arrivals of the present phase released
  VectorClock completed;  // what a waiter of a complete phase acquires
  VectorClock sent;       // by other blocks' st.async in the present phase,
  VectorClock received;   // and what a waiter acquires of that, if it says that it waits for other blocks
  std::vector<Thread*> waiting;

  // Checked mode. Who initialised it, and when; when a fence.mbarrier_init followed (0: none has): then its thread's next
  // arrival at the cluster's barrier, relaxed or not, completing the phase `told`, tells the other blocks.
  int initialiser = 0;
  u32 initialised = 0, fenced = 0, told = 0;
};

using Mbarriers = std::unordered_map<u32, Mbarrier>;

// Bytes of a copy have landed; completes the phase when nothing else is missing.
void land_bytes(Block& block, Mbarrier& barrier, u32 bytes);
// One arrival, by whoever; completes the phase likewise.
void count_arrival(Block& block, Mbarrier& barrier, u32 address, u32 bytes, Thread& thread, Site site);

}  // namespace cufa_host
