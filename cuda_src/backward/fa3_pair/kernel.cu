// FlashAttention-3 backward on Hopper for head dims beyond 128 (Shah et al. 2024, section 3 and appendix B; Algorithm 2 of
// FlashAttention-2: see backward/fa3_narrow64/kernel.cu). dK and dV of 128 keys do not fit the registers of one block there. So
// two thread blocks, a cluster, take a key block of 128 keys, 64 each; and the two consumer warpgroups of a block divide
// gradients, not keys:
//
//   value warpgroup  S^T = K Q^T, P^T = exp(S^T - L), dV += P^T dO          and a quarter of the columns of dQ
//   key warpgroup    dP^T = V dO^T, dS^T = P^T o (dP^T - D), dK += dS^T Q   and another quarter
//
// P goes from the value warpgroup to the key warpgroup through shared memory, rounded to 16 bits as dV takes it, from each thread
// to the thread of the same index: both hold the same elements. So P^T and dS^T are operands from registers, every product is
// computed once, and one warpgroup's exponentials overlap with the other's products.
//
// dQ = dS K sums over keys. Each block sends its dS of a tile, 8 KiB, to the other. It computes half of the columns of dQ from
// the dS of all 128 keys, and has these columns of the other block's K for that. So a pair adds half as much to device memory as
// two blocks on their own; additions in the L2 cache are the bottleneck (figures: NOTES.md).
//
// P and dS share a buffer. The buffer is empty when both blocks have read both dS, their own and the one they were sent; each
// block arrives at the mbarriers of both (end_dq). A thread of the producer sends dS once all of it is stored. With two buffers
// (to 192 columns) dQ of tile n - 1 is issued after the gradient (dV or dK) of tile n and the scores of tile n + 1, so that the
// other block's dS has a tile's time to arrive. This dQ overlaps with the exponentials of tile n + 1, whose P needs the same
// buffer, and is added while the gradient of tile n + 1 is in flight. With one buffer (beyond 192 columns), P of tile n + 1 needs
// that buffer, so dQ of tile n is issued in tile n. DETERMINISTIC: each block of a pair adds its columns by ticket.
//
// If v has fewer columns than q, registers are free: the value warpgroup keeps K, and the key warpgroup V, as operands of S and
// dP (HELD), which halves what these products read of shared memory.
//
// Do not change without looking at the machine code: with a soft cap, dQ of an earlier tile is added before the exponentials,
// without one before the scores of the next tile are issued; any other order spills. Arrivals at the other block are relaxed, not
// releasing. Warp roles, mbarriers and shared memory: backward/fa3_common/README.md.
#include "backward/fa3_pair/config.cuh"
#include "backward/fa3_pair/memory.cuh"

// A consumer warpgroup: the value warpgroup (VALUES) or the key warpgroup.
template <bool VALUES>
struct Consumer : TracedConsumer {
  static constexpr int COLUMNS = VALUES ? VALUE_COLUMNS : KEY_COLUMNS;  // of dQ
  static constexpr int GRADIENT_COLUMNS = VALUES ? V_DIM : HEAD_DIM;
  static constexpr int STEPS = VALUES ? K_STEPS : V_STEPS;
  static constexpr int HELD = SOFTCAP || SCORE || DROPOUT ? 0 : VALUES ? K_STEPS_HELD : V_STEPS_HELD;
  static constexpr int LATE = DS_STAGES > 1;             // 1: dQ of a tile is issued one tile later
  static constexpr bool ADDS = !VALUES && !DROPOUT;      // dP begins with -D
  static constexpr bool ADDS_FIRST = VALUES && SOFTCAP;  // a soft cap needs the registers of a pending dQ
  static constexpr Phase SCORING = VALUES ? SCORES : WEIGHT_GRADIENTS, GRADIENT = VALUES ? VALUE_GRADIENTS : KEY_GRADIENTS;

  const PairMemory smem;

  float gradient_rmem[GRADIENT_COLUMNS / 2]{};  // dV, or dK
  float S_rmem[Br / 2]{};               // S, or dP
  u32 operand_rmem[Br / 4]{};           // P, or dS
  Kept kept{};                          // DROPOUT: of the tile
  u32 held_rmem[HELD > 0 ? 4 * HELD : 1]{};  // of K, or of V
  float dQ_rmem[COLUMNS / 2]{};

  u32 pending_tiles[1 + LATE]{};  // indices in the workspace of the tiles whose dQ is pending, the latest first
  u32 n = 0;                    // counts tiles: the position in the rings

  DEVICE Consumer(const KernelParams& p, const PairMemory& smem, int thread) : TracedConsumer(p, thread), smem(smem) {}

  DEVICE void run() {
    block.descriptor_smem = smem.rings.descriptor(0);
    const u64 start_ns = TRACE ? global_timer() : 0;
    enter_item();
#pragma unroll
    for (int x = 0; x < GRADIENT_COLUMNS / 2; ++x) gradient_rmem[x] = 0.0f;
    const int count = block.count();
    if (count > 0) {
      tile = block.first();
      visit_tiles(count);
    }
    log.enter(STORE);
    store();
    if (TRACE && cluster_rank() == 0 && threadIdx.x == 128 && (!RAGGED || block.first_key() < block.keys())) {
      write_trace(p, block.index(), {block.k_block(), block.kv_head(), block.batch()}, block.tiles(), start_ns);
    }
    log.close();
    // Before this block ends, the other block must have read all dS sent to it, and made its last arrival here.
    for (int i = 0; i < DS_STAGES; ++i) smem.dS_ring().wait_empty(count + i);
  }

  DEVICE void visit_tiles(u32 end) {
    smem.rings.K.wait_full(0);
    smem.rings.V.wait_full(0);
    if constexpr (HELD > 0) {
      load_swizzled_rows<WARPGROUP_KEYS, HELD>(held_rmem, VALUES ? smem.K : smem.V, warp * 16 + lane % 16, lane / 16);
      wgmma_registers(held_rmem);
    }
    begin_scores(0);
    begin_products();
    issue_scores(0, stamp_of(tile));
    await<0>(SCORING);
    if constexpr (LATE) visit<true>(end);
    if (!LATE || advance(end)) {
      do {
        visit<false>(end);
      } while (advance(end));
    }
    if constexpr (LATE) {
      end_dq(n > 0, n - 1);
      if (n > 0) add_dq(n - 1, pending_tiles[1]);
      issue_dq(n);
    }
    end_dq(true, n);
    add_dq(n, pending_tiles[0]);
  }
  DEVICE bool advance(u32 end) {
    if (n + 1 == end) return false;
    tile = block.next(tile);
    ++n;
    return true;
  }

  // A tile whose S or dP has landed or is in flight as the oldest product. FIRST_TILE: no dQ is issued yet. The first tile has
  // its own code: ptxas serialises products that are issued on a condition and awaited without one.
  template <bool FIRST_TILE>
  DEVICE void visit(u32 end) {
    wgmma_registers(S_rmem);
    if constexpr (ADDS_FIRST) {
      end_dq(n > LATE, n - 1 - LATE);
      if (n > LATE) add_dq(n - 1 - LATE, pending_tiles[LATE]);
    }
    enter(SOFTMAX);
    draw_kept(kept, block, tile, lane_key(), lane);
    if constexpr (VALUES) make_weights();
    if constexpr (!ADDS_FIRST) end_dq(n > LATE, n - 1 - LATE);  // dQ overlapped with the exponentials
    if constexpr (VALUES) {
      hand_weights_over();
      wait_full(smem.dO_ring, n);
    } else {
      make_gradients();
      wait_full(smem.Q_ring, n);
    }
    wgmma_registers(gradient_rmem);
    wgmma_registers(operand_rmem);
    begin_products();
    issue_gradient();
    if (!ADDS_FIRST && n > LATE) add_dq(n - 1 - LATE, pending_tiles[LATE]);
    if (n + 1 < end) {
      begin_scores(n + 1);
      begin_products();
      issue_scores(n + 1, TRACE_INSIDE ? stamp_of(block.next(tile)) : 0);
    }
    if constexpr (!FIRST_TILE) issue_dq(n - LATE);
    pending_tiles[LATE] = pending_tiles[0];
    pending_tiles[0] = block.workspace_tile(tile);
    await<FIRST_TILE ? 0 : 1>(GRADIENT);  // dQ stays in flight
    if (TRACE_INSIDE && n + 1 < end) log.enter(SCORING | LANDED);
    wgmma_registers(gradient_rmem);
    wgmma_registers(operand_rmem);
    release_gradient();
  }

  // S needs Q; dP needs dO, and begins with -D.
  DEVICE void begin_scores(u32 tile_n) {
    if constexpr (VALUES) {
      wait_full(smem.Q_ring, tile_n);
    } else {
      wait_full(smem.dO_ring, tile_n);
      const u32 neg_delta = smem.neg_delta + smem.dO_ring.stage(tile_n) * TILE_STATS_BYTES;
      if constexpr (!DROPOUT) begin_with_neg_delta(S_rmem, neg_delta, int(opaque(lane_id())));
    }
    wgmma_registers(S_rmem);
  }
  DEVICE void issue_scores(u32 tile_n, u32 stamp) {
    const u32 stage = VALUES ? smem.Q_ring.stage(tile_n) : smem.dO_ring.stage(tile_n);
    const u64 keys = k_major_descriptor(VALUES ? smem.K : smem.V);
    const u64 queries = k_major_descriptor(VALUES ? smem.Q + stage * Q_TILE_BYTES : smem.dO + stage * DO_TILE_BYTES);
    if constexpr (HELD == 0) {
      wgmma_tiles_ss<Br, STEPS, Element, ADDS>(S_rmem, keys, queries);
    } else {
      issue_partly_held<Br, STEPS, HELD, ADDS>(S_rmem, held_rmem, keys, queries);
    }
    commit(SCORING, stamp);
  }
  // dV += P^T dO, or dK += dS^T Q.
  DEVICE void issue_gradient() {
    const u32 stage = VALUES ? smem.dO_ring.stage(n) : smem.Q_ring.stage(n);
    wgmma_accumulate_values<GRADIENT_COLUMNS, Br / 16, Element>(
        gradient_rmem, operand_rmem,
        mn_major_descriptor<Br>(VALUES ? smem.dO + stage * DO_TILE_BYTES : smem.Q + stage * Q_TILE_BYTES));
    commit(GRADIENT, stamp_of(tile));
  }
  DEVICE void release_gradient() const {
    if constexpr (VALUES) {
      smem.dO_ring.release(n, lane);
    } else {
      smem.Q_ring.release(n, lane);
    }
  }

  // This block's keys come first, because their dS is there first.
  DEVICE void issue_dq(u32 tile_n) {
    enter(WAIT_TURN);
    const int column = first_column(VALUES, cluster_rank());
    const u32 K = smem.K + column / ATOM_COLUMNS * ATOM_BYTES, inside_atom = column % ATOM_COLUMNS * 2;
    smem.dS_ring().wait_full(tile_n);
    wgmma_registers(dQ_rmem);
    wgmma_fence();
    ::issue_dq<WARPGROUP_KEYS, false, COLUMNS / 8>(dQ_rmem, smem.own_ds(tile_n), K + inside_atom);
    smem.sent_ring().wait_full(tile_n);
    ::issue_dq<WARPGROUP_KEYS, true, COLUMNS / 8>(dQ_rmem, smem.sent_ds(tile_n),
                                              smem.other_K + (VALUES ? 0 : ATOM_BYTES) + inside_atom);
    commit(QUERY_GRADIENTS, NO_TILE);
  }
  // Waits for the dQ that was issued last. If there is one (`any`), releases the dS buffer of tile `tile_n` in both blocks.
  // (ptxas follows no condition from the wait to the addition: the wait is unconditional.)
  DEVICE void end_dq(bool any, u32 tile_n) {
    enter(WAIT_PRODUCTS);
    wgmma_wait<0>();
    if (TRACE_INSIDE && any) log.enter(QUERY_GRADIENTS | LANDED);
    wgmma_registers(dQ_rmem);
    if (any && lane == 0) {
      const u32 empty = smem.start + SharedMemory::DS_EMPTY + tile_n % DS_STAGES * 8;
      mbarrier_arrive_cluster_relaxed(cluster_address(empty, other_rank()));
      mbarrier_arrive(empty);
    }
  }
  // dQ of tile `tile_n`, whose index in the workspace is `workspace_tile`.
  DEVICE void add_dq(u32 tile_n, u32 workspace_tile) {
    enter(ADD);
    const int first = first_column(VALUES, cluster_rank()) / 8;
    const DqHandover handover = dq_handover(smem.start);
    if constexpr (DETERMINISTIC) handover.wait_full(tile_n);
    const int existing = HEAD_DIM % ATOM_COLUMNS == 0 ? COLUMNS / 8 : D_TILES - first;
    ::add_dq<COLUMNS / 8>(dq_address(p, workspace_tile, warp, first), dQ_rmem, existing, lane);
    if constexpr (DETERMINISTIC) {
      warp_sync();  // all lanes have added
      handover.release(tile_n, lane);
    }
  }

  DEVICE int lane_key() const { return warp * 16 + lane / 4; }  // the lane's first in the block
  DEVICE void make_weights() {
    cap_scores<SOFTCAP && !SCORE>(fragment_view(S_rmem), p.softcap);
    if (block.has_hidden_scores(tile)) hide_scores_of_tile(block, S_rmem, tile, lane_key(), lane);
    exponentials(block, tile, lane_key(), S_rmem, operand_rmem, smem.lse + smem.Q_ring.stage(n) * TILE_STATS_BYTES, kept,
                 lane);
  }
  // P, times the slope of a soft cap: a factor of dS.
  DEVICE u32 weights(int i) const {
    if constexpr (!DS_HAS_WEIGHTS) return operand_rmem[i];
    const auto S = fragment_view(S_rmem);
    return Element::pack(S.at(i % 2, i / 2, 0), S.at(i % 2, i / 2, 1));
  }
  // P and dS share a buffer: warp w of the value warpgroup writes P where warp w of the key warpgroup later writes dS. A lane's
  // elements i ... i + 3 are two 16-byte units of each row. Eight lanes have rows that differ by two, and use all banks.
  DEVICE u32 weights_address(int i) const {
    const u32 row = i * 4 + lane / 16 * 8 + lane % 8 / 2 * 2 + lane / 8 % 2, unit = (warp * 2 + lane % 2) ^ (row % 8);
    return smem.own_ds(n) + row * ATOM_ROW_BYTES + unit * 16;
  }
  DEVICE void hand_weights_over() {
    wait_empty(smem.P_ring(), n);
#pragma unroll
    for (int i = 0; i < Br / 4; i += 4) {
      st_shared_vec4(weights_address(i), {weights(i), weights(i + 1), weights(i + 2), weights(i + 3)});
    }
    async_proxy_fence();  // also for L, which has been read where the copy engine writes next
    warp_sync();          // all lanes have stored
    if (lane == 0) mbarrier_arrive(smem.P_ring().full_barrier(n));
    smem.Q_ring.release(n, lane);
  }
  DEVICE void make_gradients() {
    wait_full(smem.P_ring(), n, WAIT_TURN);
    enter(SOFTMAX);
    if constexpr (DROPOUT) {
      add_neg_delta(p, S_rmem, smem.neg_delta + smem.dO_ring.stage(n) * TILE_STATS_BYTES, kept, lane);
    }
    vec4 P;  // of tiles t and t + 1
    gradients(operand_rmem, S_rmem, [&](int t, int r) {
      if (t % 2 == 0 && r == 0) P = ld_shared_vec4(weights_address(2 * t));
      return t % 2 == 0 ? r == 0 ? P.x : P.y : r == 0 ? P.z : P.w;
    });
    warp_sync();  // all lanes have read P, which dS replaces
    store_ds(smem.own_ds(n), operand_rmem, warp, lane);
    async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(smem.dS_ring().full_barrier(n));
    smem.dO_ring.release(n, lane);
  }

  DEVICE void store() {
    const int first_key = warp * 16;
    if constexpr (VALUES) {
      store_keys(block, p.dv, p.dv_stride, gradient_rmem, of_kept(p, 1.0f), first_key, lane);
    } else {
      store_keys(block, p.dk, p.dk_stride, gradient_rmem, p.scale, first_key, lane);
    }
  }
};

template <bool VALUES>
DEVICE void consume(const KernelParams& p, u32 base, int thread) {
  const PairMemory smem(opaque(base));  // computed here: no register keeps the producer's addresses
  Consumer<VALUES>(p, smem, thread).run();
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_wide_prepare(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap) {
  grid_release_next();
  if (found_tickets<PASS_THREADS>(p)) return;
  prepare_strip(p);
  zero_score_gradients<PASS_THREADS>(p);
  prepare_items(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_backward_wide(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap dO_map,
                      const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
                      const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(start);
  const u32 base = smem_address(start);
  const PairMemory smem(base);
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // warp-uniform, as ptxas can prove
  grid_release_next();
  if (thread == 0) smem.init_barriers();
  if (IRREGULAR ? thread / 32 == 1 : thread == 32) take_item(p, base);
  cluster_arrive();
  cluster_wait();  // both blocks' mbarriers are initialised and the item is there before any thread uses them

  if (warpgroup == 0) {
    registers_release_to<REGISTERS.producer>();
    if (RAGGED ? thread / 32 == 1 : thread == 32) {
      Loader<PairMemory, true>{p, &Q_map, &K_map, base}.run();
    } else if (RAGGED ? thread / 32 == 2 : thread == 64) {
      Loader<PairMemory, false>{p, &dO_map, &V_map, base}.run();
    } else if (thread == 96) {
      Sender{p, base}.run();
    } else if (DETERMINISTIC && thread == 0) {
      TicketKeeper{p, base, cluster_rank()}.run();
    }
  } else {
    registers_raise_to<REGISTERS.consumer>();
    if (warpgroup == 1) {
      consume<true>(p, base, thread);
    } else {
      consume<false>(p, base, thread);
    }
  }
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_wide_convert(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                              const __grid_constant__ TensorMap) {
  grid_await_previous();
  convert_strip(p);
}
