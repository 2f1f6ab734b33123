// The named barriers of all kernels. A block has 16; 0 is that of __syncthreads(). A kernel uses one family, numbered from its
// first barrier on.
#pragma once
#include "primitives/primitives.cuh"

enum NamedBarrier {
  BLOCK_BARRIER = 0,
  KEY_GROUP_BARRIER = 1,  // fa1_forward: one per group of warps that share rows
  KEY_PARTS_BARRIER = 1,  // fa2_backward: one per group of warps that share keys
  ROW_PAIR_BARRIER = 1,   // fa2_forward: one per pair of warps that share rows
  PING_PONG_BARRIER = 1,  // fa3_forward: the slot of each consumer warpgroup
  RING_BARRIER = 1,       // decode kernels: of the threads that fill each ring
};
