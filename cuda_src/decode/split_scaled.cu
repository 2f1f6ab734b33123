// decode_split over an e4m3 cache with one scale per token or per block of tokens (KEY_SCALES), and decode_append, which computes
// the scales of new tokens.
#include "decode/split.cu"
#include "decode/append.cuh"
