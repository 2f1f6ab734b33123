// The compile-time choices of fa3_forward_fp8. cufa/kernels/forward/fa3_fp8.py fills them in; read alone, this file is the
// example build below: head dim 128, causal, bfloat16 results, on an H100.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;        // columns of q, k, v and o: a multiple of 16, at most 256
constexpr int V_DIM = HEAD_DIM;      // fixed: v has as many columns as q
constexpr bool BFLOAT16 = true;      // results are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;  // of results; q, k and v are e4m3
constexpr int ALIGNMENT = 16;        // fixed: bytes of which each row's address is a multiple

constexpr int BLOCK_Q = 128;         // Br: query rows of a work item, 64 for each consumer warpgroup
constexpr int BLOCK_KV = 128;        // Bc: keys of a tile. The result depends on Bc: P is rounded relative to m after its tile
constexpr int NUM_WARPS = 12;        // warps of a thread block: the producer's four, and four for each consumer
constexpr int NUM_STAGES = 4;        // buffers of the K ring, and of the V ring
constexpr int ADDED_TILES = 0;       // tiles of P V that tensor cores sum before float32 additions take over; 0: all tiles
constexpr bool SPLIT_KEYS = false;   // gridDim.y thread blocks share the keys of a query block (forward/splits.cuh)
constexpr int PACKED_HEADS = 1;      // query heads of one key/value head in a tile: 1, or with SPLIT_KEYS one for each consumer
constexpr int SMEM_BYTES = 147872;   // dynamic shared memory of the launch

constexpr int Q_SCALE = 1;           // a ScaleOf (forward/float8_scores.cuh): what shares a scale of q
constexpr int K_SCALE = 1;           // the same for k
constexpr int V_SCALE = 1;           // the same for v

constexpr int MASK = 1;              // a MaskKind (shared/mask.cuh): FULL, CAUSAL or BAND
constexpr bool SKIP_MASKED_TILES = true;  // tiles without a visible score are not computed
constexpr int LENGTHS = 0;           // a LengthsKind (shared/lengths.cuh)
constexpr bool SOFTCAP = false;      // a score s becomes cap * tanh(s / cap)

constexpr bool ALIBI = false;        // fixed: support.py refuses ALiBi
constexpr bool SINK = false;         // fixed: support.py refuses sinks
constexpr bool DROPOUT = false;      // fixed: support.py refuses dropout
constexpr bool TRACE = false;        // each work item leaves a TraceRecord (shared/params.cuh)
#endif
