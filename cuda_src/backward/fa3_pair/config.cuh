// The compile-time choices of fa3_backward_wide. cufa/kernels/backward/fa3_pair.py fills them in; read alone, this
// file is the example build below: float16, head dim 192, causal.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 192;        // columns of q and k: a multiple of 8, from 136 to 256
constexpr int V_DIM = 192;           // columns of v and o: a multiple of 8, at most 256
constexpr bool BFLOAT16 = false;     // the elements are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;
constexpr bool FLOAT32_DQ = false;   // dq is float32: a share of a sum over several calls; only the sum is rounded
constexpr bool FLOAT32_DKV = false;  // the same for dk and dv
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: TMA needs 16

constexpr int BLOCK_Q = 64;          // Br: query rows of a tile
constexpr int BLOCK_KV = 128;        // Bc: keys of a key block, 64 for each thread block of the pair
constexpr int CLUSTER = 2;           // fixed: thread blocks that share the keys of a key block
constexpr int NUM_WARPS = 12;        // a producer warpgroup and two consumer warpgroups
constexpr int NUM_STAGES = 2;        // stages of the ring of Q
constexpr int DO_STAGES = 2;         // stages of the ring of dO
constexpr int DS_STAGES = 2;         // stages of the ring of dS: one where shared memory has no room for two
constexpr int K_STAGES = 1;          // fixed: buffers of K
constexpr int V_STEPS_HELD = 0;      // 16-column steps of V and of K that a warpgroup keeps in registers, as operands of dP and S
constexpr int K_STEPS_HELD = 0;
constexpr bool BULK_ADD = false;     // fixed: each thread adds its part of dQ from its registers
constexpr bool PERSISTENT = false;   // fixed: a pair of thread blocks takes one key block
constexpr int SMEM_BYTES = 206240;   // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // fixed: tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh)
constexpr bool SCORE = false;        // the caller's function changes scores (shared/score_function.cuh)
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)
constexpr bool ALIBI = false;        // a score loses slope * distance
constexpr bool SINK = false;         // a logit of each head joins the softmax's denominator
constexpr bool DROPOUT = false;      // weights are dropped at random (shared/dropout.cuh)
constexpr bool DETERMINISTIC = false;// key blocks add to dQ in a fixed order
constexpr bool WHOLE_TILES = true;   // fixed: the workspace holds whole query tiles (backward/common/workspace.cuh)

constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
