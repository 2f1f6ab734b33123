// The compile-time choices of fa2_backward_f32. cufa/kernels/backward/fa2_f32.py fills them in; read alone, this file is
// the example build below: float32, head dim 128, causal, on an H200.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q and k: a multiple of 8, at most 256
constexpr int V_DIM = 128;           // columns of v and o: the same bounds
constexpr bool TF32 = false;         // products keep 11 bits of each factor, as tf32; else each factor is a pair of float16
using Element = Float32;
constexpr bool FLOAT32_DQ = false;   // fixed: gradients are of Element, which is float32
constexpr bool FLOAT32_DKV = false;
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: 4, 8 or 16

constexpr int BLOCK_Q = 32;          // Br: query rows of a tile
constexpr int BLOCK_KV = 64;         // Bc: keys of a key block
constexpr int NUM_WARPS = 4;         // warps of a thread block
constexpr int WARP_KEYS = 16;        // keys of a warp; warps with the same keys split queries and columns
constexpr int NUM_STAGES = 1;        // query tiles in shared memory
constexpr int BLOCKS_PER_SM = 2;     // resident thread blocks that registers must suffice for (__launch_bounds__)
constexpr int SMEM_BYTES = 110864;   // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh)
constexpr bool SCORE = false;        // the caller's function changes scores (shared/score_function.cuh)
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)
constexpr bool DROPOUT = false;      // weights are dropped at random (shared/dropout.cuh)
constexpr bool ALIBI = false;        // a score loses slope * distance
constexpr bool SINK = false;         // a logit of each head joins the softmax's denominator
constexpr bool DETERMINISTIC = false;// key blocks add to dQ in a fixed order

constexpr bool WHOLE_TILES = false;  // fixed: the layout of the workspace that FA3 uses (backward/common/workspace.cuh)
constexpr bool PERSISTENT = false;   // fixed: FA3 only

constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
