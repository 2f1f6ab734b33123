// The compile-time choices of the quantiser. cufa/kernels/quantize.py fills them in; read alone, this file is the example build
// below: bfloat16 keys of head dim 128, one scale for each head, rotated.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;       // columns: a multiple of 16, at most 256
constexpr int ELEMENT_BYTES = 2;    // bytes of an element of x: 2 or 4
constexpr bool BFLOAT16 = true;     // elements of two bytes are bfloat16, else float16
constexpr int ALIGNMENT = 16;       // bytes of which each row's address is a multiple: 16, or 2 (narrow loads)
constexpr int LENGTHS = 0;          // a LengthsKind (shared/lengths.cuh)

constexpr int SCALE_OF = 1;         // a ScaleOf (quantize/rows.cuh): what shares a scale
constexpr int SCALE_BLOCK = 64;     // OF_BLOCK: tokens that share a scale
constexpr bool ROTATE = true;       // rows are multiplied by diag(signs) H / sqrt(n)
constexpr bool SMOOTH = false;      // the mean row of each head is subtracted
constexpr bool TRANSPOSE = false;   // values: written as V^T (shared/value_tile.cuh)
#endif
