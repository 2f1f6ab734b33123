// The compile-time choices of decode_split and decode_balanced. cufa/kernels/decode.py fills them in; read alone, this file is
// the example build below: decode_split_tma, float16, head dim 128, one query token, on an H200.
#ifndef CUFA_CONFIG
#define CUFA_CONFIG
#include "shared/element.cuh"

constexpr int HEAD_DIM = 128;         // columns of q and k: a multiple of 8 (16 with FP8_CACHE), at most 256
constexpr int V_DIM = 128;            // columns of v and o: the same
constexpr bool BFLOAT16 = false;      // q and o (and the cache, unless FP8_CACHE) are bfloat16, else float16
using Element = SixteenBit<BFLOAT16>;
constexpr bool FP8_CACHE = false;     // keys and values are e4m3, widened to float16; k_scale and v_scale are read
constexpr int KEY_SCALES = 0;         // FP8_CACHE: a ScaleOf (decode/scales.cuh): one scale per head, block or token
constexpr int SCALE_BLOCK = 224;      // OF_BLOCK: keys per block of a contiguous cache
constexpr int ALIGNMENT = 16;         // bytes of which each row's address is a multiple: 2, 4, 8 or 16

constexpr int BLOCK_Q = 16;           // Br: packed query rows of a block (query heads of one query group × query tokens)
constexpr int BLOCK_KV = 128;         // Bc: keys of a tile, of all rings together
constexpr int NUM_WARPS = 8;          // warps of a thread block
constexpr int ROW_WARPS = 1;          // warps that share a ring and its keys and split the rows; more than 1 only if BLOCK_Q > 16
constexpr int NUM_STAGES = 3;         // stages of each ring
constexpr int BLOCKS_PER_SM = 1;      // resident thread blocks that the register limit must allow (__launch_bounds__)
constexpr int SMEM_BYTES = 203200;    // dynamic shared memory of the launch: SharedMemory::BYTES (decode/memory.cuh)

constexpr bool TMA_COPIES = true;     // the copy engine reads the cache (sm_90), else cp.async does
constexpr bool FOLD_COMBINE = true;   // the last warp that stores its rows of a work item merges them
constexpr bool CLUSTER_MERGE = false; // the splits of a work item form a cluster and merge in it (sm_90)

constexpr bool PAGED = false;         // the cache consists of pages, which the block table lists
constexpr bool RAGGED = false;        // cache_seqlens is read; else each sequence fills the cache
constexpr bool APPEND = false;        // k_new and v_new are stored to the cache and attended to
constexpr bool QUANTIZE_NEW = false;  // an earlier launch, decode_append, has quantised k_new and v_new into the cache
constexpr int MASK = 0;               // a MaskKind (shared/mask.cuh); MASK_FULL: one query token, which sees all keys;
                                      // MASK_COLUMNS: causal within chunks of keys
constexpr bool EXEMPT_BY_SEQUENCE = false; // MASK_SETS: sequences have numbers of their own, or tokens see every key
constexpr int LENGTHS = 0;            // a LengthsKind (shared/lengths.cuh): always DENSE: decode kernels have RAGGED instead
constexpr bool SOFTCAP = false;       // a score s becomes cap * tanh(s / cap)
constexpr bool ALIBI = false;         // a score loses slope * distance
constexpr bool SCORE = false;         // the caller's function changes scores (shared/score_function.cuh)
constexpr bool SINK = false;          // a logit of each head joins the softmax's denominator
constexpr int TREE = 0;               // a TreeKind (shared/tree.cuh): which new tokens a token sees; with MASK_CAUSAL only
constexpr int SOFTMAX_MAX = 0;        // a MaximumKind (decode/maximum.cuh): where the subtracted maximum of a row comes from
constexpr bool INVARIANT = false;     // splits at fixed key positions: the bits of a row depend on its sequence alone

constexpr bool TRACE = false;         // each thread block leaves a TraceRecord for each work item it reads keys of
#endif
