// The compile-time choices of fa2_backward. cufa/kernels/backward/fa2.py fills them in; read alone, this file is the example
// build below: float16, head dim 128, causal, on an H200.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q and k: a multiple of 8, at most 256
constexpr int V_DIM = 128;           // columns of v and o: the same bounds
constexpr bool BFLOAT16 = false;     // the elements are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;
constexpr bool FLOAT32_DQ = false;   // dq is float32: a share of a sum over several calls; only the sum is rounded
constexpr bool FLOAT32_DKV = false;  // the same for dk and dv
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: 2, 4, 8 or 16

constexpr int BLOCK_Q = 64;          // Br: query rows of a tile
constexpr int BLOCK_KV = 128;        // Bc: keys of a key block
constexpr int NUM_WARPS = 8;         // warps of a thread block
constexpr int WARP_KEYS = 32;        // keys of a warp; warps with the same keys split queries and columns
constexpr int NUM_STAGES = 2;        // query tiles in shared memory
constexpr int BLOCKS_PER_SM = 1;     // resident thread blocks that registers must suffice for (__launch_bounds__)
constexpr int SMEM_BYTES = 195584;   // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh)
constexpr bool SCORE = false;        // the caller's function changes scores (shared/score_function.cuh)
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)
constexpr bool ALIBI = false;        // a score loses slope * distance
constexpr bool SINK = false;         // a logit of each head joins the softmax's denominator
constexpr bool DROPOUT = false;      // weights are dropped at random (shared/dropout.cuh)
constexpr bool DETERMINISTIC = false;// key blocks add to dQ in a fixed order

constexpr bool WHOLE_TILES = false;  // fixed: the layout of the workspace that FA3 uses (backward/common/workspace.cuh)
constexpr bool PERSISTENT = false;   // fixed: FA3 only

constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
