// The argument of forward kernels that join a running result of earlier keys (RUNNING).
#pragma once
#include "shared/params.cuh"

struct RunningParams : AttentionParams {
  float* running;      // O of the keys so far, (batch, heads, seqlen_q, head_dim), divided by its sum
  float* running_lse;  // (batch, heads, seqlen_q), natural log
  Strides running_stride;
  i64 lse_batch, lse_head;     // strides of running_lse; the last axis is contiguous
  i32 fresh_first, fresh_end;  // rows without an earlier result: neither array is read
  i32 done_first, done_end;    // rows that are finished: O goes to `o`, not to `running`
};
