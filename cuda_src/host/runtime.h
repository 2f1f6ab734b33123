// The CUDA execution model on a CPU thread: one cluster of blocks at a time, their warps, their threads as fibers.
#pragma once
#include <string>
#include <vector>

#include "host/bank_model.h"
#include "host/cluster.h"
#include "host/cluster_host.h"
#include "host/copy_groups.h"
#include "host/counters.h"
#include "host/fiber.h"
#include "host/findings.h"
#include "host/launch.h"
#include "host/mbarrier.h"
#include "host/owners.h"
#include "host/primitives_host.h"
#include "host/race_detector.h"
#include "host/tensor_core.h"
#include "host/warpgroup.h"
#include "host/wgmma_registers.h"

namespace cufa_host {

constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kNumBarriers = 16;

// Shared addresses start here, not at 0, so that a forgotten smem_address() is out of range. (The GPU's own window
// starts with 1 KiB reserved on sm_90.)
constexpr u32 kSharedBase = 1024;

struct Block;
struct Warp;

// A cp.async that has been issued and not yet waited for.
struct PendingCopy {
  u32 smem;
  u32 bytes;
  const void* global;  // null: zeros
};

// A box of a tensor, and where it lies in shared memory. Bytes in a row are a box too, of a tensor of their own.
struct Box {
  TensorMap map;
  u32 smem;
  int first[5];  // element coordinates
  bool swizzled = true;
};

// A TMA load that has been issued and has not landed.
struct BulkCopy {
  Box box;
  Thread* thread;
  u32 barrier;
};

// A store by the copy engine that has been issued, and that nobody knows to have read its shared memory; or an addition.
struct BulkStore {
  Box box;
  Site site;
  bool adds = false;
  std::vector<unsigned char> sent = {};  // what was read of shared memory, where that is known before it is written
};

// An st.async, or a copy between blocks of a cluster, that has been issued and has not landed.
struct RemoteStore {
  Thread* thread;
  u32 smem, bytes, barrier;  // of the block that it goes to
  unsigned char value[16];
  u32 source = 0;  // of a copy: where it reads the thread's block
  Site site = {"", 0};
};

struct Thread : ThreadContext {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int id = 0, lane = 0;
  int number = 0;  // in its cluster, block by block
  bool done = false;
  const char* waits_for = nullptr;  // while parked
  Site waits_at = {"", 0};

  CopyGroups<PendingCopy> copies;  // cp.async
  CopyGroups<BulkStore> stores;    // by the copy engine
  std::vector<BulkStore> additions;  // by the copy engine, that nobody knows to be done
  std::vector<BulkStore> additions_read;  // by the copy engine, which will add them to memory
  WgmmaRegisters wgmma_registers;

  u64 accesses = 0;             // to shared and global memory
  const u32* polled = nullptr;  // the counter last loaded, how, what it was, how often in a row, and `accesses` then
  bool polled_acquires = false;
  u32 polled_count = 0, polls = 0;
  u64 polled_at = 0;

  u32 bit() const { return 1u << lane; }
};

// An operation that all 32 lanes reach together.
struct Collective {
  const char* name;
  void (*execute)(Block&, Warp&);
  bool aligned;  // PTX `.aligned`: every lane must execute the very same instruction
};

// What a lane brings to a collective, and what it takes away.
struct Operand {
  u32* registers;
  u32 value, smem;
  int lane;  // source lane or lane mask
};

struct Warp {
  int index = 0;
  u32 ready = kAllLanes;  // lanes that can run
  u32 alive = kAllLanes;  // lanes that have not left the kernel
  u32 arrived = 0;        // lanes that have reached `collective`
  const Collective* collective = nullptr;
  u32 cluster_phase = 0;  // of the cluster's barrier: completes when all have arrived with this warp
  bool cluster_pending = false;  // it has arrived there and not waited
  int registers = 0, registers_asked = 0;  // of each lane
  Site site = {"", 0};  // of the collective
  Operand operands[32];
  ProductQueue products;
  WarpgroupQueue warpgroup;
  AccessLog log;
};

struct Barrier {
  u32 expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  VectorClock clock;
};

struct Block {
  Block(Cluster& cluster, int rank);
  ~Block();
  Block(const Block&) = delete;

  // All threads to the kernel's first line.
  void start(u32 linear_index);
  // Give every warp that can run the CPU once. Returns whether there was one; see `failed`.
  bool sweep();
  bool ready() const;  // a warp can run
  bool alive() const;  // a thread has not left the kernel

  Thread& thread(const Warp& warp, int lane) { return *threads[warp.index * 32 + lane]; }

  Cluster& cluster;
  const int rank;  // in the cluster
  const CufaLaunch& launch;
  Findings& findings;
  Owners& owners;
  const int worker, num_threads, num_warps;
  const bool checked, counted;
  Index3 index = {};
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  Mbarriers mbarriers;
  std::vector<Thread*> polling;            // parked until a counter in global memory changes
  int free_registers = 0;                  // that no warp has, for each lane of a warp
  std::vector<Thread*> awaiting_registers;
  std::vector<BulkCopy> bulk_copies;       // in flight
  std::vector<RemoteStore> remote_stores;  // to this block, in flight
  unsigned char* shared = nullptr;
  Counters counters;
  u64 clock_seen = 0;  // what of them the worker's clock has counted
  RaceDetector races;
  Fiber scheduler;
  u64 random_state = 1;
  bool failed = false;
};

inline int lowest(u32 mask) { return __builtin_ctz(mask); }
inline Thread& current() { return *static_cast<Thread*>(context); }

// scheduler.cpp
u32 random_number(Block& block);
// First frame of every fiber.
void thread_main();
// Which of these lanes runs next, by the launch's schedule.
int pick_lane(Block& block, u32 ready);
// Leave the CPU to others until another thread sets this lane's ready bit.
void park(Thread& thread, const char* waits_for, Site site);
// Park until all lanes of the warp are here; the last one executes.
void rendezvous(Thread& thread, const Collective& collective, Site site);
// Record a finding after which the block cannot go on. Does not return.
[[noreturn]] void abandon(Block& block, const char* kind, Site site, const std::string& message);
// "block (1,0,0) warp 2 lane 5", "block (1,0,0)"
std::string describe(const Thread& thread);
std::string describe(Index3 block);
// Record a finding; the message is only built when it is new.
template <typename Message>
void report(Block& block, const char* kind, Site site, Site other, Message message) {
  if (block.findings.count(kind, site, other)) block.findings.describe(kind, site, other, message());
}

// cluster_memory.cpp
// The block whose shared memory a cluster's address means, and the address there; null, where it means none.
Block* block_of(Thread& thread, u32 address, u32& smem);
// Let one store in flight to this block land; false when there is none.
bool land_one_store(Block& block);

// cluster_barrier.cpp
// A thread has left the kernel.
void leave_cluster(Thread& thread);

// register_budget.cpp
// Every warp has what the launch allocates for it.
void start_registers(Block& block);
// "; warp 4 asks for 240 registers per thread and has 168; of the 12 x 168 that the launch has 0 are free", or nothing.
std::string registers_text(const Block& block);

// deadlock.cpp
// "warp 2 lanes 0-15 wait for ldmatrix at …, lanes 16-31 left the kernel"
std::string who_waits(Block& block);

// bulk_copy.cpp
// The bytes in a row that the copy engine moves; where it cannot, the block is abandoned.
unsigned char* bulk_bytes(Thread& thread, u32 smem, u32 bytes, Site site);
// Let one copy in flight land; false when there is none.
bool land_one(Block& block);
// What the copy engine has read for a thread, and will add to memory, is there.
void end_additions(Thread& thread);

// memory.cpp
// The bytes behind a shared address, or null (with a finding) when out of range or misaligned.
unsigned char* shared_bytes(Thread& thread, u32 smem, u32 bytes, const char* what, Site site);
// Whether the range lies inside an array the kernel was given: false, with a finding, when the access must not be
// made. In checked mode also races on it; of a copy engine's read `raced` says whether another block may be writing it.
bool check_global(Thread& thread, const void* global, u32 bytes, Access kind, const char* what, Site site,
                  bool* raced = nullptr);
// overlap.cpp
void check_overlap(Thread& thread, const CufaArray& array, const void* global, u32 bytes, Access kind, Site site);

// memory.cpp
// For counting sectors: as if every array began on a 256-byte boundary, as device allocations do.
u64 sector_address(const CufaLaunch& launch, const void* global);
// "byte 4096 of k, which has 4000", for messages.
std::string global_place(const CufaLaunch& launch, const void* global, u32 bytes);

}  // namespace cufa_host
