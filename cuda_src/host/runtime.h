// The CUDA execution model on a CPU thread: one cluster of blocks at a time, their warps, their threads as fibers.
#pragma once
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "host/bank_model.h"
#include "host/cluster.h"
#include "host/copy_groups.h"
#include "host/counters.h"
#include "host/fiber.h"
#include "host/findings.h"
#include "host/launch.h"
#include "host/owners.h"
#include "host/primitives_host.h"
#include "host/race_detector.h"
#include "host/tensor_core.h"
#include "host/warpgroup.h"

namespace cufa_host {

constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kNumBarriers = 16;

// Shared memory starts at this address, not at 0: if a kernel forgets to add smem_address(smem) to an offset, the sum is out of
// range. (On sm_90, too, the first 1 KiB is reserved.)
constexpr u32 kSharedBase = 1024;
inline u32 offset_of(u32 smem) { return smem - kSharedBase; }

struct Block;
struct Warp;

// A cp.async in flight.
struct PendingCopy {
  u32 smem, bytes;
  const void* global;  // null: zeros
};

// A box of a tensor, and its address in shared memory. A linear copy is a box of a one-axis tensor.
struct Box {
  TensorMap map;
  u32 smem;
  int first[4];  // element coordinates
  bool swizzled = true;

  u32 bytes() const { return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.item_bytes; }
};

// A TMA load in flight.
struct BulkCopy {
  Box box;
  Thread* thread;
  u32 barrier;
};

// A store, or an addition, by the copy engine, which may not have read its shared memory yet.
struct BulkStore {
  Box box;
  Site site;
  bool adds = false;
  std::vector<unsigned char> sent = {};  // the bytes read, if shared memory may be overwritten before they are stored
};

// An st.async, or a copy between blocks of a cluster, in flight.
struct RemoteStore {
  Thread* thread;
  u32 smem, bytes, barrier;  // of the target block
  unsigned char value[16];
  u32 source = 0;  // of a copy: its address in the thread's block
  Site site = {};
};

// An mbarrier object, found by its shared address.
struct Mbarrier {
  u32 arrivals = 0;       // arrivals that complete a phase
  u32 missing = 0;        // arrivals that the present phase lacks
  i64 bytes = 0;          // bytes announced and not landed (negative: landed before they were announced)
  u32 phase = 0;          // number of the present phase
  VectorClock arrived;    // released by the arrivals of the present phase
  VectorClock completed;  // acquired by a waiter of a complete phase
  VectorClock sent;       // released by other blocks' st.async in the present phase
  VectorClock received;   // also acquired by a waiter that declares that it waits for other blocks
  std::vector<Thread*> waiting;

  // Checked mode: the thread that initialised the barrier, when, and when its fence.mbarrier_init followed (0: none has). That
  // thread's next arrival at the cluster's barrier, relaxed or not, completes phase `announced`, which tells the other blocks.
  int initialiser = 0;
  u32 initialised = 0, fenced = 0, announced = 0;
};

struct Thread : ThreadContext {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int id = 0, lane = 0;
  int number = 0;  // index in the cluster, block by block
  bool done = false;
  const char* waits_for = nullptr;  // while parked
  Site waits_at;

  CopyGroups<PendingCopy> copies;
  CopyGroups<BulkStore> stores;
  std::vector<BulkStore> additions;       // by the copy engine; the thread has not waited until they are done
  std::vector<BulkStore> additions_read;  // additions that have read shared memory and are not in global memory yet
  WgmmaRegisters wgmma_registers;

  u64 accesses = 0;             // to shared and global memory
  const u32* polled = nullptr;  // the counter last loaded; its value, loads in a row, and `accesses` at that time
  u32 polled_count = 0, polls = 0;
  u64 polled_at = 0;

  u32 bit() const { return 1u << lane; }
};

// An operation that all 32 lanes reach together.
struct Collective {
  const char* name;
  void (*execute)(Block&, Warp&);
  bool aligned;  // PTX `.aligned`: every lane must execute the same instruction
};

// What a lane brings to a collective, and its result.
struct Operand {
  u32* registers;
  u32 value, smem;
  int lane;  // source lane
  u32 result;
};

struct Warp {
  int index = 0;
  u32 ready = kAllLanes;  // lanes that can run
  u32 alive = kAllLanes;  // lanes that have not left the kernel
  u32 arrived = 0;        // lanes that have reached `collective`
  const Collective* collective = nullptr;
  u32 cluster_phase = 0;  // of the cluster's barrier: completes when all have arrived with this warp
  bool cluster_pending = false;  // has arrived at the cluster's barrier and not waited
  int registers = 0, registers_asked = 0;  // of each lane
  Site site;  // of the collective
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
  unsigned char* at(u32 smem) { return shared + offset_of(smem); }

  Cluster& cluster;
  const int rank;  // in the cluster
  const CufaLaunch& launch;
  const int num_threads, num_warps;
  const bool checked, counted;
  Index3 index = {};
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  std::unordered_map<u32, Mbarrier> mbarriers;
  std::vector<Thread*> polling;             // parked until a counter in global memory changes
  int free_registers = 0;                   // for each lane of a warp
  std::vector<Thread*> awaiting_registers;
  std::vector<BulkCopy> bulk_copies;        // in flight
  std::vector<RemoteStore> remote_stores;   // to this block, in flight
  unsigned char* shared = nullptr;
  Counters counters;
  u64 clock_seen = 0;  // the part of the counters that the worker's clock has counted
  RaceDetector races;
  Fiber scheduler;
  u64 random_state = 1;
  bool failed = false;
};

inline int lowest(u32 mask) { return __builtin_ctz(mask); }
inline Thread& current() { return *static_cast<Thread*>(context); }

// ---- Messages
std::string describe(const Thread& thread);  // "block (1,0,0) warp 2 lane 5"
std::string describe(Index3 block);          // "block (1,0,0)"

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
template <typename Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    text += std::to_string(part);
  } else {
    text += describe(part);
  }
}
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// Record a finding. The message is built only when the finding is new.
template <typename Message>
void report(Block& block, const char* kind, Site site, Site other, Message message) {
  Findings& findings = block.cluster.findings;
  if (findings.count(kind, site, other)) findings.describe(kind, site, other, message());
}
// A finding about what `thread` does at `site`: "<parts>: block (1,0,0) warp 2 lane 5 at fa2/kernel.cu:12".
template <typename... Parts>
void report(Thread& thread, const char* kind, Site site, const Parts&... parts) {
  report(*thread.block, kind, site, {}, [&] { return text_of(parts..., ": ", thread, " at ", site); });
}
// Record a finding after which the block cannot go on.
[[noreturn]] void abandon(Block& block, const char* kind, Site site, const std::string& message);
template <typename... Parts>
[[noreturn]] void abandon(Thread& thread, const char* kind, Site site, const Parts&... parts) {
  abandon(*thread.block, kind, site, text_of(parts..., ": ", thread, " at ", site));
}

// ---- scheduler.cpp
u32 random_number(Block& block);
void thread_main();  // first frame of every fiber
// The lane that runs next, by the launch's schedule.
int pick_lane(Block& block, u32 ready);
// Leave the CPU to others until another thread sets this lane's ready bit.
void park(Thread& thread, const char* waits_for, Site site);
// Let parked threads run again, and forget them.
void resume(std::vector<Thread*>& waiting);
// Park until all lanes of the warp are here; the last one executes. Returns this lane's operand.
Operand& rendezvous(Thread& thread, const Collective& collective, Site site);

// The copy in flight that lands next, removed from the list.
template <typename Copy>
Copy take_next(Block& block, std::vector<Copy>& in_flight) {
  const std::size_t i = block.launch.schedule == kRandom ? random_number(block) % in_flight.size() : 0;
  const Copy copy = in_flight[i];
  in_flight.erase(in_flight.begin() + i);
  return copy;
}

// ---- cluster_memory.cpp
// The block whose shared memory a cluster's address means, and the address there; null if it means none.
Block* block_of(Thread& thread, u32 address, u32& smem);
// Another block's mbarrier must be known to be initialised, else there is a finding.
void check_announced(Thread& thread, Block& target, const Mbarrier& barrier, u32 smem, Site site);
// Let one store in flight to this block land; false when there is none.
bool land_one_store(Block& block);

// ---- cluster_barrier.cpp: a thread has left the kernel
void leave_cluster(Thread& thread);

// ---- mbarrier.cpp
// The mbarrier at a shared address of this thread's block; without one the block is abandoned.
Mbarrier& mbarrier_at(Thread& thread, u32 address, Site site);
// Bytes of a copy have landed; completes the phase when nothing else is missing.
void land_bytes(Block& block, Mbarrier& barrier, u32 bytes);

// ---- deadlock.cpp
// Every warp has the registers that the launch allocates for it.
void start_registers(Block& block);
// "warp 2 lanes 0-15 wait for ldmatrix at …, lanes 16-31 left the kernel"
std::string who_waits(Block& block);

// ---- bulk_copy.cpp
// Bytes that the copy engine moves without a swizzle; if the copy engine cannot, the block is abandoned.
unsigned char* bulk_bytes(Thread& thread, u32 smem, u32 bytes, Site site);
// Let one load in flight land; false when there is none.
bool land_one(Block& block);
// Additions whose operands the copy engine has read reach global memory.
void end_additions(Thread& thread);

// ---- reductions.cpp: unchecked sums
void add_atomically(float* global, const float* values, u32 count);

// ---- memory.cpp
// The bytes at a shared address, or null (with a finding) when out of range or misaligned.
unsigned char* shared_bytes(Thread& thread, u32 smem, u32 bytes, const char* what, Site site);
// Whether the range lies inside an array of the kernel: false, with a finding, when the access must not be made. Checked mode
// also finds races; after a read by the copy engine, `raced` says whether another block may be writing the range.
bool check_global(Thread& thread, const void* global, u32 bytes, Access kind, const char* what, Site site,
                  bool* raced = nullptr);
// Counted mode: the bytes of a thread's load or store, and its place in the warp's access.
void count_shared(Thread& thread, AccessLog::Kind kind, u32 smem, u32 bytes, Site site);
void count_global(Thread& thread, AccessLog::Kind kind, const void* global, u32 bytes, Site site);
// "byte 4096 of k, which has 4000", for messages.
std::string global_place(const CufaLaunch& launch, const void* global, u32 bytes);

// ---- arithmetic.cpp
u16 half_from_float(float x);
float float_from_half(u16 x);

}  // namespace cufa_host

using namespace cufa_host;
