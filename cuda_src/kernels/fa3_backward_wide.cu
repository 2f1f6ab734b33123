// FlashAttention-3 backward on Hopper for head dims beyond 128, where dK and dV of 128 keys do not fit the registers of a
// block. 64 keys a block, and its two consumer warpgroups share out not keys but gradients:
//
//   ValueGroup   S^T = K Q^T, P^T = exp(S^T - L), dV += P^T dO     and the first half of the columns of dQ
//   KeyGroup     dP^T = V dO^T, dS^T = P^T o (dP^T - D), dK += dS^T Q  and the second
//
// P goes from the one to the other through shared memory, rounded to 16 bits as dV takes it, each thread to its namesake:
// both hold the same elements. So P^T and dS^T are operands from registers, every product is computed once, and one group's
// exponentials run under the other's products. By count of bytes shared memory is busy for 1.07 of the time of the products
// (with 64 x 64 tiles whose keys are shared out: 1.7), and there is room for two stages of Q and dO. The rest is as in
// fa3_backward.cu; DETERMINISTIC blocks add the two runs of dQ's columns in turns of their own, so that a turn is short.
//
// Measured (H200, bfloat16, d256, 16k tokens), as a ratio of speed: over PyTorch's flash backward 2.03 to 2.18 in turns and 1.76 to
// 1.89 alone at 4k and 16k; dP added to -D in its accumulators, so that dS is one product away from it, d256 1.02 to 1.09 (1k 1.01
// to 1.02), d192 1.03; two buffers for P 0.96 to 1.0; persistent blocks instead of one launched for each key block 0.91 to 1.0
// (d192: 0.85 to 1.1); P handed over before the copy engine's fence, and Q given back behind a product, 1.00.
// dQ is added by red from registers: there is no room for staging it. DETERMINISTIC takes 1.14 of the time full and 1.27 causal
// at 4k (d192, before dP was added to -D: 1.09 and 1.17); keepers of turns that ask and tell ahead gained 1.01 to 1.04.
// What failed: both runs of dQ in arrays of their own at d256 (640 bytes of spills), and adding the first under the next tile's
// scores (C7514: ptxas takes its registers for those of products in flight). A run of dQ in a part of an array that a longer run
// has the whole of: at other head dims than 256 ptxas serialises the products of most builds (C7511), without spills.
#include "backward_params.cuh"
#include "primitives/register_budget.cuh"
#include "tiles/backward_gradients.cuh"
#include "tiles/backward_sums.cuh"

constexpr int WEIGHT_BYTES = 128 * Br / 4 * 4;  // P of a tile: 16-bit pairs, thread by thread
// Columns of dQ: half for each group, in two runs that do not cross an atom of K.
constexpr int HALF_COLUMNS = (HEAD_DIM / 2 + 31) / 32 * 32;
static_assert(KEY_GROUPS == 1 && Br == 64, "64 keys, 64 rows of dQ");
static_assert(HALF_COLUMNS > ATOM_COLUMNS && HALF_COLUMNS <= 2 * ATOM_COLUMNS, "two runs each");
static_assert(K_BYTES == KEY_TILE_BYTES && V_BYTES == K_BYTES, "one tile");
static_assert(Q_BYTES == NUM_STAGES * QUERY_TILE_BYTES && DO_BYTES == DO_STAGES * QUERY_TILE_BYTES, "rings of tiles");
static_assert(P_BYTES == WEIGHT_BYTES && DS_BYTES == DS_STAGES * DS_PART_BYTES, "likewise");
static_assert(LSE_BYTES == NUM_STAGES * NUMBERS_BYTES && DELTA_BYTES == DO_STAGES * NUMBERS_BYTES, "numbers of their tiles");
static_assert(P_FULL_BYTES == 8 && P_EMPTY_BYTES == 8, "one buffer");
static_assert(Q_FULL_BYTES == 8 * NUM_STAGES && Q_EMPTY_BYTES == Q_FULL_BYTES, "a barrier a tile");
static_assert(DO_FULL_BYTES == 8 * DO_STAGES && DO_EMPTY_BYTES == DO_FULL_BYTES, "likewise");
static_assert(DS_FULL_BYTES == 8 * DS_STAGES && DS_EMPTY_BYTES == DS_FULL_BYTES, "likewise");
static_assert(DQ_PARTS == 2 && DQ_EMPTY_BYTES == DQ_FULL_BYTES && !BULK_ADD, "turns of parts, which are not staged");
static_assert(NUM_STAGES > 1 && DO_STAGES > 1 && DS_STAGES > 1, "tiles of two turns are in use");

struct WideMemory {
  u32 K, V, Q, dO, P, dS, lse, delta, barriers;
  ItemBarriers items;

  DEVICE explicit WideMemory(u32 start)
      : K(start + K_OFFSET), V(start + V_OFFSET), Q(start + Q_OFFSET), dO(start + DO_OFFSET), P(start + P_OFFSET),
        dS(start + DS_OFFSET), lse(start + LSE_OFFSET), delta(start + DELTA_OFFSET), barriers(start), items(start) {}

  DEVICE Turns<NUM_STAGES> Q_turns() const { return {barriers + Q_FULL_OFFSET, barriers + Q_EMPTY_OFFSET}; }
  DEVICE Turns<DO_STAGES> dO_turns() const { return {barriers + DO_FULL_OFFSET, barriers + DO_EMPTY_OFFSET}; }
  DEVICE Turns<1> P_turns() const { return {barriers + P_FULL_OFFSET, barriers + P_EMPTY_OFFSET}; }
  DEVICE Turns<DS_STAGES> dS_turns() const { return {barriers + DS_FULL_OFFSET, barriers + DS_EMPTY_OFFSET}; }
  DEVICE DqHandover dQ_handover() const { return {barriers + DQ_FULL_OFFSET, barriers + DQ_EMPTY_OFFSET}; }

  DEVICE void init_barriers() const {
    items.init();
    Q_turns().init(1, 4 * CONSUMERS);
    dO_turns().init(1, 4 * CONSUMERS);
    P_turns().init(4, 4);
    dS_turns().init(4, 4 * CONSUMERS);
    if constexpr (DETERMINISTIC) init_dq_handover(dQ_handover());
    mbarrier_init_fence();
  }
};

// One warpgroup: VALUES says which.
template <bool VALUES>
struct Consumer {
  static constexpr int FIRST_COLUMN = VALUES ? 0 : HALF_COLUMNS;
  static constexpr int MIDDLE_COLUMN = FIRST_COLUMN % ATOM_COLUMNS == 0 ? FIRST_COLUMN + ATOM_COLUMNS : 2 * ATOM_COLUMNS;
  // Beyond 224 columns with those that fill up the last atom of K, zeros, since both runs are in one array then.
  static constexpr int END_COLUMN = VALUES ? HALF_COLUMNS : HEAD_DIM > 224 ? 256 : HEAD_DIM;
  static_assert(MIDDLE_COLUMN < END_COLUMN && END_COLUMN - MIDDLE_COLUMN <= ATOM_COLUMNS, "two runs");

  const BackwardParams& p;
  const WideMemory smem;
  const int warp, lane;
  const Turns<NUM_STAGES> Q_turns = smem.Q_turns();
  const Turns<DO_STAGES> dO_turns = smem.dO_turns();
  const Turns<1> P_turns = smem.P_turns();
  const Turns<DS_STAGES> dS_turns = smem.dS_turns();

  float gradient_rmem[HEAD_DIM / 2];       // dV, or dK
  float S_rmem[Br / 2];                    // S, or dP
  u32 operand_rmem[Br / 4];                // P, or dS
  // dQ of one run of columns, then of the other; in one array where both are as long.
  static constexpr bool ONE_ARRAY = MIDDLE_COLUMN - FIRST_COLUMN == END_COLUMN - MIDDLE_COLUMN;
  float first_rmem[(MIDDLE_COLUMN - FIRST_COLUMN) / 2], second_rmem[ONE_ARRAY ? 1 : (END_COLUMN - MIDDLE_COLUMN) / 2];

  KeyBlock block{p, 0};
  QueryTile tile;
  u32 before;     // number in the workspace of the tile before
  u32 n = 0;      // number of the tile, over all items
  u32 items = 0;  // with tiles
  INSIDE(PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);)
  INSIDE(static constexpr u32 FIRST = VALUES ? SCORES : WEIGHT_GRADIENTS, SECOND = VALUES ? VALUE_GRADIENTS : KEY_GRADIENTS;)
  INSIDE(DEVICE u32 number() const { return query_tile_number(tile.head, tile.q_tile); })

  DEVICE void run() {
    INSIDE(inside.enter(WAIT_ITEM);)
    for (u32 i = 0; smem.items.has(i); ++i) {
      block.record = smem.items.record(i);
      const u64 start_ns = TRACE ? global_timer() : 0;
      INSIDE(inside.item(block.index()); inside.enter(NOTHING);)
#pragma unroll
      for (int x = 0; x < HEAD_DIM / 2; ++x) gradient_rmem[x] = 0.0f;
      const int count = block.count();
      if (count > 0) {
        tile = block.first();
        visit_tiles(n + count);
        ++items;
      }
      INSIDE(inside.enter(STORE);)
      store();
      if (TRACE && threadIdx.x == 128 && (!RAGGED || block.first_key() < block.keys())) {
        write_trace(p, block.index(), {block.k_block(), block.kv_head(), block.batch()}, block.tiles(), start_ns);
      }
      smem.items.release(i, lane);
      INSIDE(inside.enter(WAIT_ITEM);)
    }
    INSIDE(inside.close();)
  }

  DEVICE void visit_tiles(u32 end) {
    INSIDE(inside.enter(WAIT_DATA, number());)
    smem.items.keys.wait_full(items);
    mbarrier_wait(smem.items.V_full, items & 1);
    begin_scores(n);
    wgmma_fence();
    issue_scores(n);
    INSIDE(inside.in_flight(FIRST, number()); inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(FIRST, number());)
    bool first = true;
    for (;; first = false) {
      wgmma_registers(S_rmem);
      INSIDE(inside.enter(SOFTMAX, number());)
      if constexpr (VALUES) {
        make_weights();
      } else {
        make_gradients();
      }
      INSIDE(inside.enter(WAIT_DATA, number());)
      // dV += P dO, dK += dS Q
      if constexpr (VALUES) {
        dO_turns.wait_full(n);
      } else {
        Q_turns.wait_full(n);
      }
      wgmma_registers(gradient_rmem);
      wgmma_registers(operand_rmem);
      wgmma_fence();
      INSIDE(inside.enter(ISSUE, number());)
      issue_gradient();
      INSIDE(inside.in_flight(SECOND, number()); inside.enter(WAIT_PRODUCTS, number());)
      wgmma_wait<1>();
      INSIDE(if (!first) inside.landed(QUERY_GRADIENTS, NO_TILE); inside.enter(ADD, NO_TILE);)
      if (!first) add_second(before, n - 1);
      INSIDE(inside.enter(WAIT_TURN, number());)
      dS_turns.wait_full(n);
      INSIDE(inside.enter(ISSUE, number());)
      wgmma_fence();
      issue_dq<FIRST_COLUMN, MIDDLE_COLUMN>();
      INSIDE(inside.in_flight(QUERY_GRADIENTS, number());)
      if (n + 1 == end) break;
      INSIDE(inside.enter(WAIT_DATA, NO_TILE);)
      begin_scores(n + 1);
      INSIDE(inside.enter(ISSUE, NO_TILE);)
      wgmma_fence();
      issue_scores(n + 1);
      INSIDE(const u32 finished = number();)
      before = block.place(tile);
      tile = block.next(tile);
      INSIDE(inside.in_flight(FIRST, number()); inside.enter(WAIT_PRODUCTS, number());)
      wgmma_wait<0>();
      INSIDE(inside.landed(SECOND, finished); inside.landed(QUERY_GRADIENTS, finished); inside.landed(FIRST, number()); inside.enter(ADD, finished);)
      wgmma_registers(gradient_rmem);
      wgmma_registers(operand_rmem);
      release_gradient();
      add_first(before, n);
      INSIDE(inside.enter(ISSUE, finished);)
      wgmma_fence();
      issue_dq<MIDDLE_COLUMN, END_COLUMN>();
      INSIDE(inside.in_flight(QUERY_GRADIENTS, finished);)
      ++n;
    }
    before = block.place(tile);
    INSIDE(inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(SECOND, number()); inside.landed(QUERY_GRADIENTS, number()); inside.enter(ADD, number());)
    wgmma_registers(gradient_rmem);
    wgmma_registers(operand_rmem);
    release_gradient();
    add_first(before, n);
    INSIDE(inside.enter(ISSUE, number());)
    wgmma_fence();
    issue_dq<MIDDLE_COLUMN, END_COLUMN>();
    INSIDE(inside.in_flight(QUERY_GRADIENTS, number()); inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(QUERY_GRADIENTS, number()); inside.enter(ADD, number());)
    smem.items.keys.release(0, lane);
    add_second(before, n++);
  }

  // S needs Q, dP needs dO, and begins with -D.
  DEVICE void begin_scores(u32 number) {
    if constexpr (VALUES) {
      Q_turns.wait_full(number);
    } else {
      dO_turns.wait_full(number);
      begin_with_delta(S_rmem, smem.delta + dO_turns.stage(number) * NUMBERS_BYTES, int(opaque(lane_id())));
    }
    wgmma_registers(S_rmem);
  }
  DEVICE void issue_scores(u32 number) {
    const u32 stage = VALUES ? Q_turns.stage(number) : dO_turns.stage(number);
    wgmma_tiles_ss<Br, K_STEPS, BFLOAT16, !VALUES>(S_rmem, k_major_descriptor(VALUES ? smem.K : smem.V),
                                          k_major_descriptor((VALUES ? smem.Q : smem.dO) + stage * QUERY_TILE_BYTES));
    wgmma_commit();
  }
  DEVICE void issue_gradient() {
    const u32 stage = VALUES ? dO_turns.stage(n) : Q_turns.stage(n);
    wgmma_accumulate_values<HEAD_DIM, Br / 16, BFLOAT16>(
        gradient_rmem, operand_rmem, mn_major_descriptor<Br>((VALUES ? smem.dO : smem.Q) + stage * QUERY_TILE_BYTES));
    wgmma_commit();
  }
  DEVICE void release_gradient() const {
    if constexpr (VALUES) {
      dO_turns.release(n, lane);
    } else {
      Q_turns.release(n, lane);
    }
  }
  template <int BEGIN, int END>
  DEVICE auto& dq() {
    if constexpr (ONE_ARRAY || BEGIN == FIRST_COLUMN) {
      return first_rmem;
    } else {
      return second_rmem;
    }
  }
  // Columns BEGIN ... END-1 of dQ.
  template <int BEGIN, int END>
  DEVICE void issue_dq() {
    ::issue_dq<(END - BEGIN) / 8>(dq<BEGIN, END>(), smem.dS + dS_turns.stage(n) * DS_PART_BYTES,
                                  smem.K + BEGIN / ATOM_COLUMNS * (GROUP_KEYS * ATOM_ROW_BYTES) + BEGIN % ATOM_COLUMNS * 2);
  }
  // Of tile `number`, which is `of` in the workspace: columns up to the middle are a part of it, those behind another.
  template <int BEGIN, int END>
  DEVICE void add_dq(u32 of, u32 number) {
    const u32 turn = DQ_PARTS * number + (BEGIN == MIDDLE_COLUMN);
    auto& d = dq<BEGIN, END>();
    wgmma_registers(d);
    if constexpr (DETERMINISTIC) smem.dQ_handover().wait_full(turn);
    constexpr int EXISTING = (END < HEAD_DIM ? END : HEAD_DIM) - BEGIN;
    ::add_dq<(END - BEGIN) / 8>(dq_place(p, of, warp, BEGIN / 8), d, EXISTING / 8, lane);
    if constexpr (DETERMINISTIC) {
      warp_sync();  // all lanes have added
      smem.dQ_handover().release(turn, lane);
    }
  }
  DEVICE void add_first(u32 of, u32 number) { add_dq<FIRST_COLUMN, MIDDLE_COLUMN>(of, number); }
  DEVICE void add_second(u32 of, u32 number) {
    add_dq<MIDDLE_COLUMN, END_COLUMN>(of, number);
    dS_turns.release(number, lane);
  }

  // P, which dS is a multiple of; with a softcap times its slope.
  DEVICE u32 weights(int i) const {
    if constexpr (!SOFTCAP) return operand_rmem[i];
    const auto S = fragment_view(S_rmem);
    return pack_16bit<BFLOAT16>(S.at(i % 2, i / 2, 0), S.at(i % 2, i / 2, 1));
  }
  DEVICE u32 weights_place() const { return smem.P + P_turns.stage(n) * WEIGHT_BYTES + (warp * 32 + lane) * 16; }

  DEVICE int lane_key() const { return warp * 16 + lane / 4; }  // the first of this lane, in the block
  DEVICE void make_weights() {
    cap_scores<SOFTCAP>(fragment_view(S_rmem), p.softcap);
    if (block.cuts(tile)) hide_scores_of_tile(block, S_rmem, tile, lane_key(), lane);
    exponentials(block, tile, lane_key(), S_rmem, operand_rmem, smem.lse + Q_turns.stage(n) * NUMBERS_BYTES, lane);
    P_turns.wait_empty(n);
#pragma unroll
    for (int i = 0; i < Br / 4; i += 4) {
      st_shared_vec4(weights_place() + i * (128 * 4), {weights(i), weights(i + 1), weights(i + 2), weights(i + 3)});
    }
    async_proxy_fence();  // L has been read, too, where the copy engine writes next
    warp_sync();          // all lanes have stored
    if (lane == 0) mbarrier_arrive(P_turns.full_barrier(n));
    Q_turns.release(n, lane);
  }

  DEVICE void make_gradients() {
    P_turns.wait_full(n);
    vec4 P;  // of tiles t and t + 1
    gradients(operand_rmem, S_rmem, [&](int t, int r) {
      if (t % 2 == 0 && r == 0) P = ld_shared_vec4(weights_place() + t * (128 * 8));
      return t % 2 == 0 ? r == 0 ? P.x : P.y : r == 0 ? P.z : P.w;
    });
    dS_turns.wait_empty(n);
    store_ds(smem.dS + dS_turns.stage(n) * DS_PART_BYTES, operand_rmem, warp, lane);
    async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(dS_turns.full_barrier(n));
    P_turns.release(n, lane);
    dO_turns.release(n, lane);
  }

  DEVICE void store() {
    const int first_key = warp * 16;
    if constexpr (VALUES) {
      store_keys(block, p.dv, p.dv_stride, gradient_rmem, 1.0f, first_key, lane);
    } else {
      store_keys(block, p.dk, p.dk_stride, gradient_rmem, p.scale, first_key, lane);
    }
  }
};

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_wide_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap) {
  grid_release_next();
  prepare_strip(p);
  prepare_items(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_backward_wide(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap dO_map,
                      const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
                      const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(start);
  const u32 base = smem_address(start);
  const WideMemory smem(base);
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // uniform, and known to be
  grid_release_next();
  if (thread == 0) smem.init_barriers();
  if (LOOKED_UP ? thread / 32 == 1 : thread == 32) take_item(p, base);
  block_sync();  // nobody may wait on a barrier that is not initialised, or read an item that is not there

  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    if (RAGGED ? thread / 32 == 1 : thread == 32) {
      Loader<WideMemory, true>{p, &Q_map, &K_map, base}.run();
    } else if (RAGGED ? thread / 32 == 2 : thread == 64) {
      Loader<WideMemory, false>{p, &dO_map, &V_map, base}.run();
    } else if (DETERMINISTIC && (thread == 96 || thread == 0)) {
      TurnKeeper<WideMemory>{p, base, thread != 96}.run();
    }
  } else {
    registers_raise_to<CONSUMER_REGISTERS>();
    if (warpgroup == 1) {
      Consumer<true>{p, WideMemory(opaque(base)), thread / 32 % 4, thread % 32}.run();
    } else {
      Consumer<false>{p, WideMemory(opaque(base)), thread / 32 % 4, thread % 32}.run();
    }
  }
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_wide_convert(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap) {
  grid_await_previous();
  convert_strip(p);
}
