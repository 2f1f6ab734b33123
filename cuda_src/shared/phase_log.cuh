// The log of an inside trace: one per warp. The translation unit of such a build includes this file before the kernel.
//
// A stamp is eight bytes in global memory, by one elected lane: the low half of its SM's clock, in cycles, and the phase that
// begins. (%globaltimer moves in steps of 32 ns or more, too coarse for a phase.) A log holds both clocks at its beginning and at
// its end: they convert cycles to nanoseconds. The compiler keeps stamps in order and does not move them across memory accesses
// and waits; arithmetic, such as exponentials, may move across a stamp.
#pragma once
#include "primitives/stamp.cuh"
#include "shared/phases.cuh"

// Memory before the trace records: LogsHead directly before them; before it the logs, last to first, a LogHead and its stamps
// each.
struct LogsHead {
  u32 sm;       // the SM whose blocks keep logs, or ANY_SM
  u32 claimed;  // logs claimed by warps; may exceed `logs`
  u32 logs;     // logs in memory
  u32 stamps;   // room of each log
};
struct LogHead {
  u64 start_clock, end_clock;  // clock of the SM, in cycles
  u64 start_ns, end_ns;        // %globaltimer, read at the same time
  u32 thread_block, warp, sm;
  u32 stamps;  // stamps made, also the stamps that did not fit
};
constexpr u32 STAMP_BYTES = 8, NO_LOG = 1u << 30, ANY_SM = 0xffffffffu;

// The log of one warp. Lanes that are not elected, or find no free log, stamp nothing.
struct PhaseLog {
  TraceRecord* base;
  u32 at = 0, end = NO_LOG;  // bytes before the records: of the next stamp, and of the first stamp without room

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

  // The warp enters a phase, for a tile or another number.
  DEVICE void enter(u32 phase, u32 number = 0) {
    st_global_if(i32(at - end) > 0, place(at), {sm_clock_low(), phase << 24 | (number & 0xffffffu)});
    at -= STAMP_BYTES;
  }
  DEVICE void item(u32 index) { enter(ITEM, index); }
  DEVICE void begin(u32 item_number, u32 phase) {
    item(item_number);
    enter(phase, NO_TILE);
  }
  // Products are in flight from now on; products are known to be complete.
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
