// The parameters of forward kernels with a score function. (Backward kernels: backward/params.cuh.)
#pragma once
#include "shared/params.cuh"

// An array of a score function. Strides are in elements; axes that it lacks are not read.
struct ScoreArray {
  i64 stride0, stride1, stride2, stride3;
  i32 size0, size1, size2, size3;
};

struct ScoredParams : AttentionParams {
  const void* score0;
  const void* score1;
  const void* score2;
  const void* score3;
  ScoreArray array0, array1, array2, array3;
  float score_scale;  // the softmax scale: the function takes scaled scores. scale_log2 and softcap are then those of scale 1
};
