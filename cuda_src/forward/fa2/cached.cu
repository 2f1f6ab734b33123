// fa2_forward over keys in a cache (forward/cache.cuh). The first launch appends new tokens.
#include "forward/fa2/kernel.cu"
#include "forward/append.cuh"

KERNEL __launch_bounds__(APPEND_TOKENS * 32) append(const __grid_constant__ ForwardParams p) {
  append_tokens(cache_of(p));
}
