// The C interface that cufa/run/emulate/launch.py calls through ctypes: plain structs, held together by a test.
#pragma once
#include <cstdint>

extern "C" {

enum CufaMode : std::int32_t { kPlain = 0, kChecked = 1, kCounted = 2 };
enum CufaSchedule : std::int32_t { kAscending = 0, kDescending = 1, kRandom = 2 };

// An array in global memory that the kernel may touch.
struct CufaArray {
  const char* name;
  void* begin;
  std::uint64_t bytes;
  const std::uint8_t* valid;  // one byte for each `granule` bytes: 0 where there is padding; null: all of it
  std::uint32_t granule;
  std::int32_t writable;
  // Checked mode, one byte for each granule: accesses of the previous launch if it may still be running (else null), and accesses
  // of this launch (null: not wanted).
  const std::uint8_t* before;
  std::uint8_t* now;
};
enum CufaTouched : std::uint8_t { kWritten = 1, kRead = 2 };

struct CufaLaunch {
  void (*entry)(const void* const* arguments);
  const void* const* arguments;  // one pointer a kernel parameter
  std::uint32_t grid[3];
  std::int32_t num_threads;
  std::uint32_t shared_bytes;
  std::uint32_t cluster;  // blocks of a cluster, along the grid's x: divides grid[0]
  std::int32_t workers;   // CPU threads
  std::int32_t mode, schedule;
  std::uint32_t seed;        // of the random schedule
  std::int32_t late_copies;   // copies, and additions by the copy engine, happen when they are waited for, not when issued
  std::int32_t ordered_sums;  // checked mode: additions to memory must have a fixed order
  const CufaArray* arrays;
  std::int32_t num_arrays;
  std::uint64_t* counters;  // (blocks, kNumCounters), row-major; null when not wanted
  char* findings;           // text, zero-terminated
  std::uint64_t findings_bytes;
};

// One pass of a warp's access to shared memory: up to 128 bytes, or one 8 × 16-byte matrix.
struct CufaPass {
  enum Kind : std::int32_t { kLoad, kStore, kLdmatrix, kStmatrix, kWgmmaA, kWgmmaB };
  const char* file;
  std::int32_t line, kind, instruction, count;
  std::uint32_t bytes, waves;   // of each address; wavefronts of the pass
  std::uint32_t addresses[32];  // offsets in the block's shared memory
  std::uint8_t lanes[32];
};

// Keep the passes of the next launches, which must be counted and on one CPU thread, until `capacity` is reached; null: no more.
// Returns how many the last call has kept.
std::uint64_t cufa_keep_passes(CufaPass* begin, std::uint64_t capacity);

// 0: clean; 1: findings; 2: stopped early (deadlock or divergence).
int cufa_launch(const CufaLaunch* launch);

// Names of the counters, comma-separated, in the order of a row.
const char* cufa_counter_names();
}
