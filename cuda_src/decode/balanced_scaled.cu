// decode_balanced over an e4m3 cache whose tokens, or blocks of tokens, have scales of their own (KEY_SCALES). The launch that
// appends new tokens computes their scales.
#include "decode/balanced.cu"
#include "decode/append.cuh"
