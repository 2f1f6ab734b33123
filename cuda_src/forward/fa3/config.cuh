// The compile-time choices of fa3_forward. cufa/kernels/forward/fa3.py fills them in; read alone, this file is the example
// build below: float16, head dim 128, causal, on an H200.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q and k: a multiple of 8, at most 256
constexpr int V_DIM = 128;           // columns of v and o: the same
constexpr bool BFLOAT16 = false;     // the elements are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;
constexpr int ALIGNMENT = 16;        // bytes of which each row's address is a multiple: TMA needs 16

constexpr int BLOCK_Q = 128;         // Br: query rows of a work item, 64 for each consumer warpgroup
constexpr int BLOCK_KV = 128;        // Bc: keys of a tile, a multiple of 16
constexpr int NUM_WARPS = 12;        // warps of a thread block: the producer's four, and four for each consumer
constexpr int NUM_STAGES = 3;        // buffers of the K ring, and of the V ring
constexpr int Q_STAGES = 1;          // buffers of Q for each consumer; 2: the next item's Q arrives during this item
constexpr bool Q_IN_REGISTERS = true;  // consumers keep Q in registers, so that its buffer is free early
constexpr bool PING_PONG = true;     // consumers issue their products in fixed order, one after another
constexpr bool STORE_BY_TMA = true;  // O leaves through the buffer that its Q came in, if that buffer is free by then
constexpr int SMEM_BYTES = 230056;   // dynamic shared memory of the launch

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh)
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh)
constexpr bool SCORE = false;        // the caller's function changes scores (shared/score_function.cuh)
constexpr int PAGE_BOX = 0;          // keys in a cache: keys of a page that TMA copies at once, all in one page; else 0
constexpr int TREE = 0;              // a TreeKind (shared/tree.cuh): queries see their ancestors among the queries
constexpr bool INVARIANT = false;     // the bits of a row depend on its sequence alone: no row decides on another row's maximum
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)
constexpr bool ALIBI = false;        // a score loses slope * distance
constexpr bool SINK = false;         // a logit of each head joins the softmax's denominator
constexpr bool DROPOUT = false;      // weights are dropped at random (shared/dropout.cuh)

constexpr bool RUNNING = false;      // O joins a running result of earlier keys (forward/running.cuh)
constexpr bool SPLIT_KEYS = false;   // gridDim.y thread blocks share the keys of a query block (forward/splits.cuh)
constexpr int PACKED_HEADS = 1;      // query heads of one key/value head in a tile; more than 1 only with SPLIT_KEYS

constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
