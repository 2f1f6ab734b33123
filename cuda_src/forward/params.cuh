// The parameter structure of a forward kernel that takes score functions, dropout, or keys in a cache (forward/cache.cuh).
#pragma once
#include "shared/dropout_params.cuh"
#include "shared/score_function.cuh"

struct CacheParams;
using UndroppedParams = typename Choose<SCORE, ScoredParams, typename Choose<CACHED, CacheParams, AttentionParams>::type>::type;
using ForwardParams =
    typename Choose<DROPOUT, typename Choose<SCORE, ScoredDroppedParams, DroppedParams>::type, UndroppedParams>::type;
static_assert(!SCORE || !CACHED, "score functions of prefill take keys that lie in an array");
static_assert(!DROPOUT || !CACHED, "dropout takes keys that lie in an array");
