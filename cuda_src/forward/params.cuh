// The parameter structure of a forward kernel that takes score functions, dropout, or keys in a cache (forward/cache.cuh).
#pragma once
#include "shared/dropout_params.cuh"
#include "shared/score_function.cuh"

struct CacheParams;
struct ScoredCacheParams;
using UndroppedParams = typename Choose<SCORE, typename Choose<CACHED, ScoredCacheParams, ScoredParams>::type,
                                        typename Choose<CACHED, CacheParams, AttentionParams>::type>::type;
using ForwardParams =
    typename Choose<DROPOUT, typename Choose<SCORE, ScoredDroppedParams, DroppedParams>::type, UndroppedParams>::type;
static_assert(!DROPOUT || !CACHED, "dropout takes keys that lie in an array");
