// The phases of a warp, stamped by an inside trace. An inside trace is a build of its own (TRACE_INSIDE), because stamps take
// time: there PhaseLog is the struct of shared/phase_log.cuh. In other builds it is empty.
//
// INSIDE(...) holds code of inside traces only; the digest of a kernel's sources leaves it out (cufa/build/compiler.py).
#pragma once
#include "shared/params.cuh"

#ifndef TRACE_INSIDE
#define TRACE_INSIDE 0  // 1: the build of an inside trace
#endif
#if TRACE_INSIDE
#define INSIDE(...) __VA_ARGS__
#else
#define INSIDE(...)
#endif

// What a warp does; one phase at a time. cufa/build/phases.py reads these names and explains them.
enum Phase : u32 {
  NOTHING,        // between phases; also the end of the log
  ITEM,           // not a phase: the work item from now on, by the number of its trace record
  WAIT_ITEM,      // for the next work item
  WAIT_DATA,      // for a tile to land
  WAIT_SPACE,     // for a buffer to be free
  WAIT_TURN,      // for other warps, or for a ping-pong slot (stored traces have this name)
  WAIT_PRODUCTS,  // for products in flight
  COPY,           // issues copies of a tile
  ISSUE,          // issues products
  SCORES,         // S = Q K^T. This phase and the next five may also be in flight
  VALUES,         // O += P V; with mma.sync, also the exponentials that overlap with it
  WEIGHT_GRADIENTS,  // dP = dO V^T
  VALUE_GRADIENTS,   // dV += P^T dO
  KEY_GRADIENTS,     // dK += dS^T Q
  QUERY_GRADIENTS,   // dQ = dS K
  SOFTMAX,        // mask, maxima, exponentials, rescaling; backward: P and dS
  TILE,           // products and softmax of a tile in one
  ADD,            // adds its part of dQ
  MERGE,          // merges the parts of several warps or blocks
  STORE,          // stores results
};
enum : u32 {
  IN_FLIGHT = 0x40, LANDED = 0x80,  // flags of products, added to the phase
  NO_TILE = 0xffffff,  // the stamp has no tile, or the tile is not known
};

// A query tile of a head in stamps: head * 4096 + tile, both modulo 4096.
DEVICE u32 query_tile_stamp(int head, int q_tile) { return u32(head) % 4096 << 12 | u32(q_tile) % 4096; }

#if !TRACE_INSIDE
// The log of other builds has no bytes and does nothing.
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
#endif  // else shared/phase_log.cuh, which the translation unit includes before the kernel
