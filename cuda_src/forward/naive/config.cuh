// The compile-time choices of naive. cufa/kernels/forward/naive.py fills them in; read alone, this file is the example build
// below: float16, head dim 128, causal.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q and k: a multiple of 8, at most 256
constexpr int V_DIM = 128;           // columns of v and o: the same
constexpr bool FLOAT32 = false;      // the elements are float32, else as BFLOAT16 says
constexpr bool BFLOAT16 = false;     // the elements are bfloat16, else float16
constexpr bool TF32 = false;         // FLOAT32: products on the tensor cores in tf32, else in float32 on the FMA units
using Element = typename Choose<FLOAT32, Float32, SixteenBit<BFLOAT16>>::type;

constexpr int BLOCK_Q = 64;          // rows of an output tile
constexpr int BLOCK_KV = 64;         // columns of an output tile
constexpr int NUM_WARPS = 4;         // warps of a thread block
constexpr int BLOCKS_PER_SM = 4;     // resident thread blocks that registers must suffice for (__launch_bounds__)
constexpr int SMEM_BYTES = 18432;    // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh); this kernel takes dense arrays only
constexpr bool SCORE = false;        // the caller's function changes scores (shared/score_function.cuh)
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)
constexpr bool DROPOUT = false;      // weights are dropped at random (shared/dropout.cuh)
#endif
