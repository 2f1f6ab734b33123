// The compile-time choices of fa3_backward at head dims 72 to 128. cufa/kernels/backward/fa3.py fills them in; read alone, this
// file is the example build below: float16, head dim 128, causal, a thread block for each key block.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q and k: a multiple of 8, at most 128; HEAD_DIM or V_DIM exceeds 64
constexpr int V_DIM = 128;           // columns of v and o: the same bounds
constexpr bool BFLOAT16 = false;     // the elements are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;
constexpr bool FLOAT32_DQ = false;   // dq is float32: a share of a sum over several calls; only the sum is rounded
constexpr bool FLOAT32_DKV = false;  // the same for dk and dv
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: TMA needs 16

constexpr int BLOCK_Q = 64;          // Br: query rows of a tile
constexpr int BLOCK_KV = 128;        // Bc: keys of a key block, 64 for each consumer warpgroup
constexpr int CLUSTER = 1;           // fixed: thread blocks that share the keys of a key block
constexpr int NUM_WARPS = 12;        // a producer warpgroup and two consumer warpgroups
constexpr int NUM_STAGES = 2;        // stages of the ring of Q
constexpr int DO_STAGES = 2;         // stages of the ring of dO
constexpr int DS_STAGES = 2;         // stages of the ring of dS
constexpr int K_STAGES = 1;          // buffers of K: two where a persistent block goes on to the next item without a gap
constexpr int V_STEPS_HELD = 0;      // 16-column steps of V and of K that a warpgroup keeps in registers, as operands of dP and S
constexpr int K_STEPS_HELD = 0;
constexpr bool BULK_ADD = true;      // the copy engine adds dQ from shared memory, else each thread from its registers
constexpr bool PERSISTENT = false;   // a thread block takes several key blocks, else one
constexpr int SMEM_BYTES = 214400;   // dynamic shared memory of the launch

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
