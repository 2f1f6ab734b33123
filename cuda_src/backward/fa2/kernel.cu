// FlashAttention-2 backward for float16 and bfloat16 on tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 2:
//
//   l. 3-4    dQ = 0, D = rowsum(dO o O)           fa2_backward_prepare
//   l. 5-7    key blocks j; K_j, V_j, dK, dV = 0   the grid: one thread block per key block and key/value head
//   l. 8-9    query blocks i; Q_i, dO_i, L_i, D_i  the loop, copied during the tile before; for all heads of the group
//   l. 10-11  S = Q_i K_j^T, P = exp(S - L_i)      visit_tile(): visit_query_tile(), as S^T = K_j Q_i^T
//   l. 12     dV += P^T dO_i                       visit_tile()
//   l. 13-14  dP = dO_i V_j^T, dS = P o (dP - D)   visit_tile(), likewise transposed
//   l. 15     dQ_i += dS K_j                       add_dq(), one tile later
//   l. 16     dK += dS^T Q_i                       visit_tile()
//   l. 18     dK, dV                               store_gradients(); dQ: fa2_backward_convert
//
// Here is what a block does when; its parts are in tiles: what a warp's share is (backward_mma_shape.cuh), what it makes of a
// query tile (backward_mma_products.cuh), what it adds to dQ (backward_mma_dq.cuh), how it ends (backward_mma_store.cuh).
//
// Where it departs, measured on an H200 (bfloat16, 16k tokens, time as a ratio):
//   - S and dP are made transposed, so that a warp's P^T and dS^T are operands of its dV and dK as they lie in registers;
//     only partners that share its keys read them from shared memory. dS goes there anyhow, for dQ.
//   - dQ is added one tile later, half of the warps before they visit a tile and half behind it: memory takes additions
//     slower than all warps at once send them (without any the kernel took 0.77 at d256, 0.89 at d128, 0.93 at d64). Worth
//     2 to 8% at d128 and d256 (d256 causal at 1k: nothing); in two runs, the first added under the second, d256 at 16k
//     gains 8% in all. Two runs at d64 or d128 lose up to 6%, halves of the warps at d64 with a mask 2%.
//   - dQ lies in the workspace as accumulators do, so that a warp adds 512 neighbouring bytes in one instruction (0.98
//     of four additions of 128 bytes each).
//   - Gradients of a group's keys stay in registers over all of its query heads: 32/8 heads take as long as 32/32, within
//     5%. Where they leave SMs idle the planner cuts key blocks in two: 0.80 of the time of 2 x 32/8 x 1k causal.
//   - DETERMINISTIC: turns from right to left, looked up a tile ahead and passed on by another warp than waits for them, for
//     groups of heads side by side (block_in_turn). At 4k and d128 that takes 1.08 of the time without turns, full and causal.
//     When it took 1.06, and 1.09 causal, head after head took 1.38 and 1.12; the first warp waiting, 1.09 and 1.10; a turn
//     looked up when it is needed, 1.11 and 1.13; acquired by a fence or a second load when its count was right already, 1.18
//     and 1.19, or 1.13 and 1.14; passed on before S, 1.07 and 1.11. Loads that do not acquire would save 1%.
// Tried and lost: one stage (1.04 to 1.10 at d128 and d256, even at d64), 32 or 128 query rows per tile at d64 (1.07,
// 1.20), 64 keys at d128 (1.13), copies of the next tile in one burst (1.05 at d128).
#include "backward/fa2/config.cuh"
#include "backward/fa2/dq.cuh"
#include "backward/fa2/products.cuh"
#include "backward/fa2/store.cuh"
#include "backward/fa2/tile_part.cuh"
#include "backward/common/passes.cuh"
#include "backward/common/schedule.cuh"
#include "mma/copy.cuh"

KERNEL __launch_bounds__(PASS_THREADS) fa2_backward_prepare(const __grid_constant__ BackwardParams p) {
  prepare_strip(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_backward(const __grid_constant__ BackwardParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int key_group = warp / PARTS, part = warp % PARTS;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  PhaseLog inside(p.trace, lane == 0, blockIdx.x, COPY);

  // Alg. 2, l. 5
  const KeyItem item = key_item<Bc>(p, blockIdx.x, 8 * HEAD_DIM);
  const auto sequence = sequence_of(p, item.batch);
  if (LENGTHS_KIND == PACKED && item.k_block * Bc >= sequence.stored_keys()) return;  // behind the end of its sequence
  const HeadMask mask = head_mask(p, sequence);
  const TileRange tiles = visited_queries<Br, Bc>(mask, item.k_block);
  constexpr bool LOOKED_UP = is_looked_up(MASK_KIND);
  static_assert(!LOOKED_UP || !DETERMINISTIC, "turns are known where tiles lie side by side");
  static_assert(!LOOKED_UP || (LENGTHS_KIND == DENSE && !ALIBI && !SINK), "bands have those");
  const BackwardWorkspace workspace(p);
  const int first_key = item.k_block * Bc, valid_keys = sequence.keys() - first_key;
  const int group_size = p.heads / p.kv_heads, first_head = item.kv_head * group_size;
  const i64 batch_head = i64(sequence.batch()) * p.heads;
  const int first_strip = LENGTHS_KIND == PACKED ? first_packed_block<STRIP>(int(sequence.first_row()), item.batch) : 0;
  const u32 first_turn = LENGTHS_KIND == PACKED ? first_packed_block<Br>(int(sequence.first_row()), item.batch) : 0;
  const DqTurns<Br, Bc> turns{p, workspace, item.k_block, batch_head, &mask, first_turn};

  const u32 smem_base = smem_address(smem);
  const u32 K_smem = smem_base + SharedMemory::K, V_smem = smem_base + SharedMemory::V, Q_smem = smem_base + SharedMemory::Q;
  const u32 dO_smem = smem_base + SharedMemory::DO, rows_smem = smem_base + SharedMemory::ROWS;
  const u32 P_smem = smem_base + SharedMemory::P, dS_smem = smem_base + SharedMemory::DS;
  // Where registers are scarce the mask of a sequence waits in the last 16 bytes of the first row of K, which no tile uses.
  const u32 parked_smem = K_smem + PITCH - 16;
  constexpr bool PARK_MASK = LENGTHS_KIND != DENSE && !(SHARED_KEYS && NUM_STAGES == 2);
  if (PARK_MASK && thread == 0) {
    st_shared_vec4(parked_smem, {u32(mask.rows), u32(mask.keys), u32(mask.first), u32(mask.last)});
  }
  // Where tiles are looked up that place is the item's.
  if (LOOKED_UP && thread == 0) st_shared_vec4(parked_smem, {u32(item.k_block), u32(item.kv_head), u32(item.batch), 0});
  auto parked_item = [&]() -> KeyItem {
    const vec4 found = ld_shared_vec4(parked_smem);
    return {int(found.x), int(found.y), int(found.z)};
  };
  auto mask_of_head = [&]() -> HeadMask {
    if constexpr (LENGTHS_KIND == DENSE) return head_mask(p);
    if constexpr (!PARK_MASK) return mask;
    const vec4 found = ld_shared_vec4(parked_smem);
    return {int(found.x), int(found.y), int(found.z), int(found.w)};
  };
  const u32 rows_first = lane_offset_rows_first<PITCH>(lane), columns_first = lane_offset_columns_first<PITCH>(lane);
  const u32 warp_keys = key_group * WARP_KEYS;
  // Columns of dK and dV, and of dQ, that this warp computes: where the head dim is not shared out evenly, the last warps
  // start earlier, and compute some that others do, too.
  const int first_tile = min(part * O_TILES, D_TILES - O_TILES);
  const int dq_row = warp % DQ_ROW_WARPS * 32, dq_share = warp / DQ_ROW_WARPS * DQ_TILES;
  const int first_dq_tile = min(dq_share, D_TILES - DQ_TILES);
  auto adds_first = [&] { return !STAGGERED || thread_id() < NUM_THREADS / 2; };

  // Alg. 2, l. 7
  float dK_rmem[KEY_TILES][O_TILES][4] = {}, dV_rmem[KEY_TILES][O_TILES][4] = {};

  // Alg. 2, l. 9, asynchronously, in K_STEPS parts: Q, dO and the row numbers of one tile. Rows past the end become zeros,
  // which add nothing to dK and dV whatever their P, exp2(0 - 0), is.
  struct TileCopy {
    const char *Q, *dO, *numbers;  // where this thread begins
    u32 stage;
    int valid_rows, thread;
  };
  auto copy_of = [&](QueryTile tile, u32 stage, bool valid) -> TileCopy {
    const int row = tile.q_tile * Br;
    return {static_cast<const char*>(p.q) +
                2 * (sequence.batch() * p.q_stride.batch + tile.head * p.q_stride.head + (sequence.first_row() + row) * p.q_stride.seq),
            static_cast<const char*>(p.dout) +
                2 * (sequence.batch() * p.dout_stride.batch + tile.head * p.dout_stride.head + (sequence.first_row() + row) * p.dout_stride.seq),
            workspace.rows + (row_numbers(p, sequence, batch_head + tile.head) + row) * ROW_NUMBER_BYTES, stage,
            valid ? sequence.rows() - row : 0, thread_id()};
  };
  auto copy_part = [&](const TileCopy& copy, int x) {
    copy_tile_part<Br, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(  //
        x, Q_smem + copy.stage * STAGE_BYTES, copy.Q, p.q_stride.seq * 2, copy.valid_rows, copy.thread);
    copy_tile_part<Br, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(  //
        x, dO_smem + copy.stage * STAGE_BYTES, copy.dO, p.dout_stride.seq * 2, copy.valid_rows, copy.thread);
    if (x == 0 && copy.thread < Br) {
      cp_async_small<ROW_NUMBER_BYTES>(rows_smem + copy.stage * NUMBERS_BYTES + copy.thread * ROW_NUMBER_BYTES,
                                       copy.numbers + copy.thread * ROW_NUMBER_BYTES, copy.thread < copy.valid_rows);
    }
  };
  auto copy_tile = [&](QueryTile tile, u32 stage) {
    const TileCopy copy = copy_of(tile, stage, true);
#pragma unroll
    for (int x = 0; x < K_STEPS; ++x) copy_part(copy, x);
  };

  // Where tiles are looked up: the one that is visited, the one after it, and how many have been.
  QueryWalk query_walk;
  WalkedTile walked{-1}, walked_next{-1};
  int walked_head = first_head;
  QueryTile before{first_head, 0};
  u32 turn = 0;
  TileTally tally;
  auto find_next = [&](const KeyItem& item) {
    walked_next = query_walk.next(p, item.k_block, item.batch, item.kv_head);
  };
  auto upcoming = [&] { return QueryTile{first_head + query_walk.head, walked_next.tile()}; };

  // Alg. 2, l. 10-14 and 16 for one query tile; dS is left for add_dq().
  auto visit_tile = [&](QueryTile tile, u32 stage, auto copy_next) {
    const bool masked = LOOKED_UP ? walked.masked() || (parked_item().k_block + 1) * Bc > p.seqlen_k
                                  : tile.q_tile < tiles.clear_first || tile.q_tile >= tiles.clear_end || valid_keys < Bc;
    const u32 Q = Q_smem + stage * STAGE_BYTES, dO = dO_smem + stage * STAGE_BYTES;
    const u32 P_keys = P_smem + warp_keys * S_PITCH, dS_keys = dS_smem + stage * TILE_BYTES + warp_keys * S_PITCH;
    visit_query_tile(p, sequence, item, tile, stage, masked, Q, dO, P_keys, dS_keys, K_smem, V_smem, rows_smem, rows_first,
                     columns_first, warp_keys, key_group, part, first_tile, first_key, lane, dK_rmem, dV_rmem, parked_item,
                     mask_of_head, copy_next, inside, query_tile_number(tile.head, tile.q_tile));
  };

  // Alg. 2, l. 15: 32 rows and a share of the columns for each warp.
  auto add_dq = [&](QueryTile tile, u32 stage) {
    const int strip = (tile.q_tile * Br + dq_row) / STRIP;
    float* const dQ = workspace.strip(batch_head + tile.head, first_strip + strip) + first_dq_tile * ACCUMULATOR;
    const int strips = LENGTHS_KIND == PACKED ? (sequence.rows() - 1) / STRIP + 1 : workspace.strips;
    const u32 dS_lane = dS_smem + stage * TILE_BYTES + dq_row * 2 + lane_offset_columns_first<S_PITCH>(lane);
    const u32 K_lane = K_smem + first_dq_tile * 16 + rows_first;
    add_query_gradients(dQ, strip, strips, first_dq_tile, dq_share, dS_lane, K_lane, lane, inside,
                        query_tile_number(tile.head, tile.q_tile));
  };

  if constexpr (LOOKED_UP) find_next(item);
  int remaining = LOOKED_UP ? int(walked_next.exists()) : group_size * (tiles.end - tiles.first);  // LOOKED_UP: is there any?
  QueryTile current{first_head, tiles.first};
  bool pending = false;  // `current` is not in dQ yet
  auto stage = [&] { return LOOKED_UP ? turn % NUM_STAGES : u32(remaining % NUM_STAGES); };  // of `current`
  // DETERMINISTIC: the tile before is in dQ, but its turn is not passed on. That waits until all additions have arrived, so
  // it is done behind the S of the tile after next, and by another warp than the one that awaits turns: the first of those
  // that add late.
  bool passing = false;
  u32 count = 0;
  auto awaits = [&] { return thread_id() == NUM_THREADS / 2; };
  auto passes_on = [&] { return thread_id() == NUM_THREADS - 32; };
  if (remaining > 0) {
    if constexpr (HEAD_DIM % 16 != 0) {
      zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(K_smem, thread);
      zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(V_smem, thread);
      zero_padding<NUM_STAGES * Br, ROW_BYTES, PITCH, NUM_THREADS>(Q_smem, thread);
      zero_padding<NUM_STAGES * Br, ROW_BYTES, PITCH, NUM_THREADS>(dO_smem, thread);
    }
    // Alg. 2, l. 6
    const char* K = static_cast<const char*>(p.k) +
                    2 * (sequence.batch() * p.k_stride.batch + item.kv_head * p.k_stride.head +
                         (sequence.first_key() + first_key) * p.k_stride.seq);
    const char* V = static_cast<const char*>(p.v) +
                    2 * (sequence.batch() * p.v_stride.batch + item.kv_head * p.v_stride.head +
                         (sequence.first_key() + first_key) * p.v_stride.seq);
    copy_tile_async<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(K_smem, K, p.k_stride.seq * 2, valid_keys, thread);
    copy_tile_async<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(V_smem, V, p.v_stride.seq * 2, valid_keys, thread);
    if constexpr (NUM_STAGES == 2) {
      copy_tile(LOOKED_UP ? upcoming() : current, LOOKED_UP ? 1 : (remaining - 1) % 2);
    }
    cp_async_commit();
  }

  // Alg. 2, l. 8
  for (;;) {
    inside.enter(WAIT_DATA, NO_TILE);
    cp_async_wait<0>();
    if constexpr (LOOKED_UP) {  // they follow from the walk, and take no registers from tile to tile
      current = {walked_head, walked.tile()};
      remaining = walked_next.exists();
    }
    if (DETERMINISTIC) inside.enter(WAIT_TURN, NO_TILE);
    if (DETERMINISTIC && pending && awaits()) turns.await(current, count);
    // All warps are done with the tile before, and have left its dS. With two stages, the next tile has landed for all.
    block_sync();
    inside.enter(NOTHING);
    if constexpr (NUM_STAGES == 1) {
      if (remaining > 0) {
        copy_tile(LOOKED_UP ? upcoming() : pending ? current.next(tiles) : current, 0);
        cp_async_commit();
      }
    }
    if (pending && (adds_first() || remaining == 0)) add_dq(current, stage());
    if (remaining == 0) break;
    if constexpr (NUM_STAGES == 1) {
      await_copies<0>(inside, NO_TILE, NOTHING);  // the tile has landed for all, and dS has been read by all
    }
    if constexpr (LOOKED_UP) {
      before = current, walked_head = upcoming().head, walked = walked_next;
      if (TRACE && walked_head == first_head) tally.count(walked.tile(), walked.masked());
      ++turn;
      find_next(parked_item());
      current = {walked_head, walked.tile()};
      remaining = walked_next.exists();
    } else {
      if (pending) current = current.next(tiles);
      --remaining;
    }
    const TileCopy copy = copy_of(LOOKED_UP ? upcoming() : current.next(tiles), stage() ^ 1, remaining > 0);
    if (DETERMINISTIC && awaits()) count = turns.count(current);  // long before it is compared
    visit_tile(current, stage(), [&](int x) {
      if (NUM_STAGES == 2) copy_part(copy, x);  // nothing is read behind the last tile
      if (DETERMINISTIC && x == K_STEPS - 1 && passing && passes_on()) {
        turns.pass_on(current.previous(tiles).previous(tiles));
      }
    });
    cp_async_commit();
    if (pending && !adds_first()) add_dq(LOOKED_UP ? before : current.previous(tiles), stage() ^ 1);
    passing = pending;
    pending = true;
  }

  inside.enter(STORE);
  // Alg. 2, l. 18: dK and dV take the places of this warp's keys of K and V.
  block_sync();  // no warp reads K any more
  // Read anew, as registers are scarce.
  const KeyItem own = LOOKED_UP ? parked_item() : item;
  const auto ended = sequence_of(p, own.batch);
  const int own_key = LOOKED_UP ? own.k_block * Bc : first_key, own_keys = LOOKED_UP ? p.seqlen_k - own_key : valid_keys;
  const int stored_keys = LENGTHS_KIND == DENSE ? own_keys : ended.stored_keys() - own_key;
  if (DETERMINISTIC && pending && passes_on()) {
    if (passing) turns.pass_on(current.previous(tiles));
    turns.pass_on(current);
  }
  store_gradients(p, own, ended, own_key, own_keys, stored_keys, K_smem, V_smem, warp_keys, key_group, part, first_tile, dK_rmem,
                  dV_rmem, lane);

  inside.close();
  if constexpr (TRACE) {
    block_sync();  // the record ends when the last warp has stored
    const TileRange traced = LOOKED_UP ? tally.range(tiles.total) : tiles;
    const bool exists = LENGTHS_KIND == DENSE || valid_keys > 0;
    if (thread == 0 && exists) write_trace(p, blockIdx.x, {item.k_block, item.kv_head, item.batch}, traced, start_ns);
  }
}

KERNEL __launch_bounds__(PASS_THREADS, 8) fa2_backward_convert(const __grid_constant__ BackwardParams p) { convert_strip(p); }
