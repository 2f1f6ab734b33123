// The parameter structure of a forward kernel that takes score functions, or keys in a cache (shared/cache_params.cuh).
#pragma once
#include "shared/score_function.cuh"

struct CacheParams;
using ForwardParams = typename Choose<SCORE, ScoredParams, typename Choose<CACHED, CacheParams, AttentionParams>::type>::type;
static_assert(!SCORE || !CACHED, "score functions of prefill take keys that lie in an array");
