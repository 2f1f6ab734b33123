// What each warp of a kernel does when, stamped by an inside trace: a build of its own (TRACE_INSIDE), as stamps take time.
//
// INSIDE(...) holds what only that build has: other builds do not see it, nor does the digest of a kernel's sources
// (cufa/build/compiler.py), so that a stamp makes no measurement stale. A stamp is eight bytes in global memory by one elected
// lane: the low half of its SM's clock, which counts cycles, and what begins. %globaltimer moves in steps of 32 ns or more, too
// coarse for a phase; a log holds one pair of both clocks at its beginning and one at its end, from which nanoseconds follow.
//
// The compiler keeps stamps in their order and does not move them over accesses to memory and waits; arithmetic, such as
// exponentials, may move over a stamp in either direction.
#pragma once
#include "shared/params.cuh"
#include "primitives/stamp.cuh"

#ifndef TRACE_INSIDE
#define TRACE_INSIDE 0  // 1: the build of an inside trace
#endif
#if TRACE_INSIDE
#define INSIDE(...) __VA_ARGS__
#else
#define INSIDE(...)
#endif

// What a warp does, one thing at a time. cufa/bench/phases.py reads these names from here, and says what they are.
enum Phase : u32 {
  NOTHING,        // between what is stamped; also the end of the log
  ITEM,           // no phase: which work item the warp is busy with from now on, by the number of its trace record
  WAIT_ITEM,      // for the next work item
  WAIT_DATA,      // for a tile to land
  WAIT_SPACE,     // for a buffer to be free
  WAIT_TURN,      // for other warps, by a barrier that gives turns
  WAIT_PRODUCTS,  // for products in flight
  COPY,           // asks for a tile
  ISSUE,          // issues products
  SCORES,         // S = Q K^T. From here on also what is in flight
  VALUES,         // O += P V; where warps multiply themselves, with the exponentials that run under it
  WEIGHT_GRADIENTS,  // dP = dO V^T
  VALUE_GRADIENTS,   // dV += P^T dO
  KEY_GRADIENTS,     // dK += dS^T Q
  QUERY_GRADIENTS,   // dQ = dS K
  SOFTMAX,        // mask, maxima, exponentials, rescaling; backward: P and dS
  TILE,           // products and softmax of a tile in one
  ADD,            // adds its part of dQ
  MERGE,          // puts the parts of several warps or blocks together
  STORE,          // stores results
};
enum : u32 {
  IN_FLIGHT = 0x40, LANDED = 0x80,  // of products, beside the phase
  NO_TILE = 0xffffff,  // what a stamp is about has no number, or is not known
};

// A tile of queries of one head, as a stamp's number (of more than 4096 heads or tiles the rest).
DEVICE u32 query_tile_number(int head, int q_tile) { return u32(head) % 4096 << 12 | u32(q_tile) % 4096; }

#if !TRACE_INSIDE
// The log of other builds: it has no bytes and does nothing.
struct PhaseLog {
  DEVICE PhaseLog(TraceRecord*, bool) {}
  DEVICE PhaseLog(TraceRecord*, bool, u32, u32) {}
  DEVICE void begin(u32, u32) {}
  DEVICE void enter(u32, u32 = 0) {}
  DEVICE void item(u32) {}
  DEVICE void in_flight(u32, u32) {}
  DEVICE void landed(u32, u32) {}
  DEVICE void close() {}
};
#else

// Just before the trace records lies this, and before it, last to first, the logs: a LogHead each, and its stamps.
struct LogsHead {
  u32 sm;       // whose blocks keep logs; ANY_SM: all blocks
  u32 claimed;  // by warps, more than there are if not all found one
  u32 logs;     // that there are
  u32 stamps;   // that each has room for
};
struct LogHead {
  u64 start_clock, end_clock;  // of the SM
  u64 start_ns, end_ns;        // %globaltimer, read at the same time
  u32 thread_block, warp, sm;
  u32 stamps;  // made; those that did not fit are counted, too
};
constexpr u32 STAMP_BYTES = 8, NO_LOG = 1u << 30, ANY_SM = 0xffffffffu;

// The log of one warp. Every lane has one; but one that is not elected, or finds no log free, stamps nothing.
struct PhaseLog {
  TraceRecord* base;
  u32 at = 0, end = NO_LOG;  // bytes before the records: of the next stamp, and of the first that has no room

  DEVICE PhaseLog(TraceRecord* records, bool elected) : base(records) {
    if (!elected) return;
    LogsHead* const head = reinterpret_cast<LogsHead*>(records) - 1;
    const u32 sm = ld_global<u32>(&head->sm), logs = ld_global<u32>(&head->logs);
    if (sm != ANY_SM && sm != sm_id()) return;
    const u32 index = atomic_add(&head->claimed, 1);
    if (index >= logs) return;
    const u32 bytes = ld_global<u32>(&head->stamps) * STAMP_BYTES;
    end = u32(sizeof(LogsHead)) + index * (bytes + u32(sizeof(LogHead)));
    at = end + bytes;
    LogHead* const log = reinterpret_cast<LogHead*>(place(at)) - 1;
    st_global(&log->thread_block, blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    st_global(&log->warp, u32(thread_id()) / 32);
    st_global(&log->sm, sm_id());
    st_global(&log->start_ns, global_timer());
    st_global(&log->start_clock, sm_clock());
  }
  // The log of a warp that takes one work item, number `item_number`, and begins with a phase.
  DEVICE PhaseLog(TraceRecord* records, bool elected, u32 item_number, u32 phase) : PhaseLog(records, elected) {
    begin(item_number, phase);
  }

  DEVICE char* place(u32 before) const { return reinterpret_cast<char*>(base) - before; }

  // From now on this warp does this, for this tile or with this number.
  DEVICE void enter(u32 phase, u32 number = 0) {
    st_global_if(i32(at - end) > 0, place(at), {sm_clock_low(), phase << 24 | (number & 0xffffffu)});
    at -= STAMP_BYTES;
  }
  DEVICE void item(u32 index) { enter(ITEM, index); }
  DEVICE void begin(u32 item_number, u32 phase) {
    item(item_number);
    enter(phase, NO_TILE);
  }
  // Products are in flight from now on; and those are now known to be done.
  DEVICE void in_flight(u32 products, u32 tile) { enter(products | IN_FLIGHT, tile); }
  DEVICE void landed(u32 products, u32 tile) { enter(products | LANDED, tile); }

  DEVICE void close() {
    enter(NOTHING);
    if (end == NO_LOG) return;
    const u32 bytes = ld_global<u32>(&(reinterpret_cast<LogsHead*>(base) - 1)->stamps) * STAMP_BYTES;
    LogHead* const log = reinterpret_cast<LogHead*>(place(end + bytes)) - 1;
    st_global(&log->stamps, (end + bytes - at) / STAMP_BYTES);
    st_global(&log->end_ns, global_timer());
    st_global(&log->end_clock, sm_clock());
  }
};
#endif  // !TRACE_INSIDE
