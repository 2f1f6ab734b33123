// FlashAttention-3 backward on Hopper for head dims beyond 128, where dK and dV of 128 keys do not fit the registers of a
// block. A key block is 128 keys of two thread blocks, a cluster, with 64 keys each; and a block's two consumer warpgroups share out
// not keys but gradients:
//
//   ValueGroup   S^T = K Q^T, P^T = exp(S^T - L), dV += P^T dO          and a quarter of the columns of dQ
//   KeyGroup     dP^T = V dO^T, dS^T = P^T o (dP^T - D), dK += dS^T Q   and another
//
// P goes from the one to the other through shared memory, rounded to 16 bits as dV takes it, each thread to its namesake:
// both hold the same elements. So P^T and dS^T are operands from registers, every product is computed once, and one group's
// exponentials run under the other's products.
//
// dQ = dS K sums over keys. Each block sends its dS of a tile, 8 KiB, to the other, and works out half of the columns of dQ
// from the dS of all 128 keys: for that it has these columns of the other block's K, too. So half as much is added in device
// memory as by blocks for themselves, and additions are what binds: an H100's L2 cache takes 2.8 to 2.9 TB/s of them, whatever the
// mask, the head dim and the way (red, copy engine, half and half). Blocks of 64 keys for themselves were 1.41 (d256) and 1.32
// (d192) times as fast with the additions left out, and without loads no faster.
//
// A tile's way: P lies where its dS will, each warp's in the bytes that its namesake writes dS to. A buffer is free when both blocks
// have read both parts, their own copy and the one that was sent; each says so to both (end_dq). A thread of the producer sends
// dS when all of it is stored. dQ of a tile is asked for a tile later, behind the gradient of that one and the scores of the one
// after it: what the other block sends has the time of a tile to come. It runs under the exponentials of the tile after it, whose P
// takes the same buffer and waits for it, and is added under the gradients. Beyond 192 columns there is room for one buffer, which P
// of the next tile needs: there dQ is asked for in its own tile, and all this is a tile earlier.
// DETERMINISTIC blocks add in turns, each block of a pair its columns.
//
// Measured (H100, bfloat16, 16k tokens), as a ratio of speed:
// - over blocks of 64 keys for themselves, in turns: d256 1k 1.20 full and 1.16 causal, 4k 1.24 and 1.22, 16k causal 1.27; four query
//   heads to a key, 4k causal 1.55; d192 4k 1.19 and 1.13, 1k causal 1.09; d160 and d200 4k causal 1.12 and 1.21. In a fixed order
//   d256 4k 1.59 and 1.58, d192 1.26 and 1.30;
// - over PyTorch's flash backward, alone: d256 1.88 to 2.10 (in turns 1.93 to 2.39);
// - dQ asked for a tile later (H200; in turns / alone): d192 4k full 1.05 / 1.03, causal 1.04 / 1.05, 1k causal 1.01 / 1.01, d160 4k
//   causal 1.0. A third buffer of dS besides, and its wait behind the hand-over of P: 1.0 to 1.01 / 0.99 to 1.01, in a fixed order 1.03
//   / 1.01;
// - arrivals that release to the cluster, once a tile, instead of relaxed ones: 0.8 (primitives/cluster_copy.cuh);
// - Q and dO brought by multicast, each block half of a tile for both: 1.0 in turns and alone. A third stage of Q at d192: 1.0;
// - of blocks for themselves: dP added to -D in its accumulators, so that dS is one product away from it, d256 1.02 to 1.09;
//   persistent blocks instead of one launched for each key block 0.91 to 1.0.
// With a soft cap dQ of an earlier tile is added before the exponentials: no build at d256 spills then (NVRTC 13.5), which took 48 to
// 92 bytes. Without one it is added before the scores of the next tile are asked for: behind them, up to 32 bytes (NVRTC 13.0).
// What failed: a run of dQ in a part of an array that a longer run has the whole of: at other head dims than 256 ptxas serialises
// the products of most builds (C7511), without spills.
#include "shared/element.cuh"
using Element = SixteenBit<BFLOAT16>;
#include "backward/fa3_pair/memory.cuh"

// One warpgroup: VALUES says which.
template <bool VALUES>
struct Consumer {
  static constexpr int COLUMNS = VALUES ? VALUE_COLUMNS : KEY_COLUMNS;  // of dQ
  static constexpr int LATE = DS_STAGES > 1;  // 1: dQ of a tile is asked for a tile later
  static constexpr bool DQ_FIRST = VALUES && SOFTCAP;  // a soft cap takes the registers in which dQ of an earlier tile lies

  const BackwardParams& p;
  const WideMemory smem;
  const int warp, lane;
  const Ring<NUM_STAGES> Q_turns = smem.Q_turns();
  const Ring<DO_STAGES> dO_turns = smem.dO_turns();

  float gradient_rmem[HEAD_DIM / 2];  // dV, or dK
  float S_rmem[Br / 2];               // S, or dP
  u32 operand_rmem[Br / 4];           // P, or dS
  float dQ_rmem[COLUMNS / 2];

  KeyBlock block{p, 0};
  QueryTile tile;
  u32 before[1 + LATE];  // numbers in the workspace of the tiles whose dQ is still to be added, the last one first
  u32 n = 0;             // number of the tile
  INSIDE(PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);)
  INSIDE(static constexpr u32 FIRST = VALUES ? SCORES : WEIGHT_GRADIENTS, SECOND = VALUES ? VALUE_GRADIENTS : KEY_GRADIENTS;)
  INSIDE(DEVICE static u32 number_of(QueryTile of) { return query_tile_number(of.head, of.q_tile); })
  INSIDE(DEVICE u32 number() const { return number_of(tile); })

  DEVICE void run() {
    block.record = smem.items.record(0);
    const u64 start_ns = TRACE ? global_timer() : 0;
    INSIDE(inside.item(block.index()); inside.enter(NOTHING);)
#pragma unroll
    for (int x = 0; x < HEAD_DIM / 2; ++x) gradient_rmem[x] = 0.0f;
    const int count = block.count();
    if (count > 0) {
      tile = block.first();
      visit_tiles(count);
    }
    INSIDE(inside.enter(STORE);)
    store();
    if (TRACE && cluster_rank() == 0 && threadIdx.x == 128 && (!RAGGED || block.first_key() < block.keys())) {
      write_trace(p, block.index(), {block.k_block(), block.kv_head(), block.batch()}, block.tiles(), start_ns);
    }
    INSIDE(inside.close();)
    // The other block has read all that it was sent, has said so, and sends nothing more to this one, which may end.
    for (int i = 0; i < DS_STAGES; ++i) smem.dS_turns().wait_empty(count + i);
  }

  DEVICE void visit_tiles(u32 end) {
    INSIDE(inside.enter(WAIT_DATA, number());)
    smem.items.keys.wait_full(0);
    smem.items.values.wait_full(0);
    begin_scores(0);
    wgmma_fence();
    issue_scores(0);
    INSIDE(inside.in_flight(FIRST, number()); inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    if constexpr (LATE) visit<true>(end);
    if (!LATE || advance(end)) {
      do {
        visit<false>(end);
      } while (advance(end));
    }
    if constexpr (LATE) {
      end_dq(n > 0, n - 1);
      if (n > 0) add_dq(n - 1, before[1]);
      issue_dq(n);
    }
    end_dq(true, n);
    add_dq(n, before[0]);
  }
  DEVICE bool advance(u32 end) {
    if (n + 1 == end) return false;
    tile = block.next(tile);
    ++n;
    return true;
  }

  // A tile whose scores have landed. FIRST_TILE: no dQ is asked for yet. It has code of its own, for ptxas serialises products
  // that are asked for on a condition and awaited without one.
  template <bool FIRST_TILE>
  DEVICE void visit(u32 end) {
    INSIDE(inside.landed(FIRST, number());)
    wgmma_registers(S_rmem);
    if constexpr (DQ_FIRST) {
      end_dq(n > LATE, n - 1 - LATE);
      if (n > LATE) add_dq(n - 1 - LATE, before[LATE]);
    }
    INSIDE(inside.enter(SOFTMAX, number());)
    if constexpr (VALUES) make_weights();
    if constexpr (!DQ_FIRST) end_dq(n > LATE, n - 1 - LATE);  // which ran under the exponentials
    if constexpr (VALUES) {
      hand_weights_over();
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
    INSIDE(inside.enter(ISSUE, number());)
    wgmma_registers(gradient_rmem);
    wgmma_registers(operand_rmem);
    wgmma_fence();
    issue_gradient();
    INSIDE(inside.in_flight(SECOND, number());)
    if (!DQ_FIRST && n > LATE) add_dq(n - 1 - LATE, before[LATE]);
    if (n + 1 < end) {
      INSIDE(inside.enter(WAIT_DATA, NO_TILE);)
      begin_scores(n + 1);
      INSIDE(inside.enter(ISSUE, NO_TILE);)
      wgmma_fence();
      issue_scores(n + 1);
      INSIDE(inside.in_flight(FIRST, number_of(block.next(tile)));)
    }
    if constexpr (!FIRST_TILE) issue_dq(n - LATE);
    INSIDE(inside.enter(WAIT_PRODUCTS, number());)
    before[LATE] = before[0];
    before[0] = block.place(tile);
    wgmma_wait<FIRST_TILE ? 0 : 1>();  // dQ goes on
    INSIDE(inside.landed(SECOND, number());)
    wgmma_registers(gradient_rmem);
    wgmma_registers(operand_rmem);
    release_gradient();
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
    wgmma_tiles_ss<Br, K_STEPS, Element, !VALUES>(S_rmem, k_major_descriptor(VALUES ? smem.K : smem.V),
                                          k_major_descriptor((VALUES ? smem.Q : smem.dO) + stage * QUERY_TILE_BYTES));
    wgmma_commit();
  }
  DEVICE void issue_gradient() {
    const u32 stage = VALUES ? dO_turns.stage(n) : Q_turns.stage(n);
    wgmma_accumulate_values<HEAD_DIM, Br / 16, Element>(
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

  // The keys of this block first, whose dS is there first.
  DEVICE void issue_dq(u32 number) {
    INSIDE(inside.enter(WAIT_TURN, NO_TILE);)
    const int column = first_column(VALUES, cluster_rank());
    const u32 K = smem.K + column / ATOM_COLUMNS * ATOM_BYTES, inside_atom = column % ATOM_COLUMNS * 2;
    smem.dS_turns().wait_full(number);
    wgmma_registers(dQ_rmem);
    wgmma_fence();
    ask_for_dq<GROUP_KEYS, false, COLUMNS / 8>(dQ_rmem, smem.own_ds(number), K + inside_atom);
    smem.sent_turns().wait_full(number);
    ask_for_dq<GROUP_KEYS, true, COLUMNS / 8>(dQ_rmem, smem.sent_ds(number),
                                              smem.other_K + (VALUES ? 0 : ATOM_BYTES) + inside_atom);
    wgmma_commit();
    INSIDE(inside.in_flight(QUERY_GRADIENTS, number == n ? this->number() : NO_TILE);)
  }
  // The last products that were asked for, if any: those of `number`, for whose buffer of dS both blocks wait. (ptxas follows no
  // condition from the wait to the addition: where there are none it waits, too.)
  DEVICE void end_dq(bool any, u32 number) {
    INSIDE(inside.enter(WAIT_PRODUCTS, NO_TILE);)
    wgmma_wait<0>();
    INSIDE(if (any) inside.landed(QUERY_GRADIENTS, NO_TILE); inside.enter(SOFTMAX, NO_TILE);)
    wgmma_registers(dQ_rmem);
    if (any && lane == 0) {
      const u32 empty = smem.barriers + DS_EMPTY_OFFSET + number % DS_STAGES * 8;
      mbarrier_arrive_cluster_relaxed(cluster_address(empty, other_rank()));
      mbarrier_arrive(empty);
    }
  }
  // Of tile `number`, which has this number in the workspace.
  DEVICE void add_dq(u32 number, u32 place) {
    INSIDE(inside.enter(ADD, NO_TILE);)
    const int first = first_column(VALUES, cluster_rank()) / 8;
    if constexpr (DETERMINISTIC) smem.dQ_handover().wait_full(number);
    const int existing = HEAD_DIM % ATOM_COLUMNS == 0 ? COLUMNS / 8 : D_TILES - first;
    ::add_dq<COLUMNS / 8>(dq_place(p, place, warp, first), dQ_rmem, existing, lane);
    if constexpr (DETERMINISTIC) {
      warp_sync();  // all lanes have added
      smem.dQ_handover().release(number, lane);
    }
  }

  // P, which dS is a multiple of; with a softcap times its slope.
  DEVICE u32 weights(int i) const {
    if constexpr (!SOFTCAP) return operand_rmem[i];
    const auto S = fragment_view(S_rmem);
    return Element::pack(S.at(i % 2, i / 2, 0), S.at(i % 2, i / 2, 1));
  }
  // Where a lane's elements i ... i + 3 lie, in what its warp's namesake writes dS to: two 16-byte units of each row. Eight lanes
  // have rows that differ by two, of which no two units lie in the same banks.
  DEVICE u32 weights_place(int i) const {
    const u32 row = i * 4 + lane / 16 * 8 + lane % 8 / 2 * 2 + lane / 8 % 2, unit = (warp * 2 + lane % 2) ^ (row % 8);
    return smem.own_ds(n) + row * ATOM_ROW_BYTES + unit * 16;
  }

  DEVICE int lane_key() const { return warp * 16 + lane / 4; }  // the first of this lane, in the block
  DEVICE void make_weights() {
    cap_scores<SOFTCAP>(fragment_view(S_rmem), p.softcap);
    if (block.cuts(tile)) hide_scores_of_tile(block, S_rmem, tile, lane_key(), lane);
    exponentials(block, tile, lane_key(), S_rmem, operand_rmem, smem.lse + Q_turns.stage(n) * NUMBERS_BYTES, lane);
  }
  DEVICE void hand_weights_over() {
    INSIDE(inside.enter(WAIT_SPACE, number());)
    smem.P_turns().wait_empty(n);
    INSIDE(inside.enter(SOFTMAX, number());)
#pragma unroll
    for (int i = 0; i < Br / 4; i += 4) {
      st_shared_vec4(weights_place(i), {weights(i), weights(i + 1), weights(i + 2), weights(i + 3)});
    }
    async_proxy_fence();  // L has been read, too, where the copy engine writes next
    warp_sync();          // all lanes have stored
    if (lane == 0) mbarrier_arrive(smem.P_turns().full_barrier(n));
    Q_turns.release(n, lane);
  }

  DEVICE void make_gradients() {
    INSIDE(inside.enter(WAIT_TURN, number());)
    smem.P_turns().wait_full(n);
    INSIDE(inside.enter(SOFTMAX, number());)
    vec4 P;  // of tiles t and t + 1
    gradients(operand_rmem, S_rmem, [&](int t, int r) {
      if (t % 2 == 0 && r == 0) P = ld_shared_vec4(weights_place(2 * t));
      return t % 2 == 0 ? r == 0 ? P.x : P.y : r == 0 ? P.z : P.w;
    });
    warp_sync();  // all lanes have read P, which dS takes the place of
    store_ds(smem.own_ds(n), operand_rmem, warp, lane);
    async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(smem.dS_turns().full_barrier(n));
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
  cluster_arrive();
  cluster_wait();  // nobody may wait on a barrier that is not initialised, send to it, or read an item that is not there

  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    if (RAGGED ? thread / 32 == 1 : thread == 32) {
      Loader<WideMemory, true>{p, &Q_map, &K_map, base}.run();
    } else if (RAGGED ? thread / 32 == 2 : thread == 64) {
      Loader<WideMemory, false>{p, &dO_map, &V_map, base}.run();
    } else if (thread == 96) {
      Sender{p, base}.run();
    } else if (DETERMINISTIC && thread == 0) {
      TurnKeeper<WideMemory>{p, base, cluster_rank()}.run();
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
