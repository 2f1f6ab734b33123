// The compile-time choices of fa1_forward_f32. cufa/kernels/forward/fa1.py fills them in; read alone, this file is the example
// build below: float32, head dim 64, causal, on an H200.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 64;         // columns of q, k, v and o: a multiple of 8, at most 256
constexpr bool TF32 = false;         // products keep 11 bits of each factor, as tf32; else each factor is a pair of float16
using Element = Float32;
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: 4, 8 or 16

constexpr int BLOCK_Q = 64;          // Br: query rows of a block
constexpr int BLOCK_KV = 128;        // Bc: keys of a block
constexpr int NUM_WARPS = 4;         // warps of a thread block
constexpr int KEY_WARPS = 4;         // warps that share query rows and split the keys of a block
constexpr int BLOCKS_PER_SM = 1;     // resident thread blocks that registers must suffice for (__launch_bounds__)
constexpr int SMEM_BYTES = 112640;   // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh); this kernel takes dense arrays only
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)

constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
