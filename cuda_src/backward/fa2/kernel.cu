// FlashAttention-2 backward for float16 and bfloat16 on tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 2:
//
//   l. 3-4    dQ = 0, D = rowsum(dO o O)           fa2_backward_prepare
//   l. 5-7    key blocks j; K_j, V_j, dK, dV = 0   the grid: one thread block per key block and key/value head
//   l. 8-9    query blocks i; Q_i, dO_i, L_i, D_i  the loop, copied during the previous tile; all heads of the query group
//   l. 10-11  S = Q_i K_j^T, P = exp(S - L_i)      visit_query_tile(), as S^T = K_j Q_i^T
//   l. 12     dV += P^T dO_i                       visit_query_tile()
//   l. 13-14  dP = dO_i V_j^T, dS = P o (dP - D)   visit_query_tile(), transposed too
//   l. 15     dQ_i += dS K_j                       add_query_gradients(), one tile later
//   l. 16     dK += dS^T Q_i                       visit_query_tile()
//   l. 18     dK, dV                               store_gradients(); dQ: fa2_backward_convert
//
// This file holds the order of work in a thread block. shape.cuh: the share of each warp; products.cuh: what a warp computes of a
// query tile; dq.cuh: what it adds to dQ; store.cuh: how dK and dV are stored.
//
// Departures, and why:
//   - S and dP are computed transposed: P^T and dS^T are then, as they stand in registers, operands of the warp's dV and dK. Only
//     warps that share keys read them from shared memory. dS is written there for dQ in any case.
//   - dQ is added one tile later, by half of the warps before they visit a tile and by the other half after it: memory takes
//     additions more slowly than all warps at once send them.
//   - dQ is stored in the workspace in the layout of accumulators: a warp adds 512 adjacent bytes in one instruction.
//   - dK and dV stay in registers over all query heads of a query group. If query groups leave SMs idle, the planner halves key
//     blocks.
//   - DETERMINISTIC: key blocks add to a tile of dQ by ticket, from right to left. A ticket is read one tile ahead, and a warp
//     other than the waiting one passes it on. Head batches run side by side (batched_block).
// Do not change: visit_query_tile() takes its operands as parameters, not as a struct (see there); one tile is in flight per
// stage. Measurements and failed experiments: NOTES.md.
#include "backward/fa2/config.cuh"
#include "backward/fa2/dq.cuh"
#include "backward/fa2/products.cuh"
#include "backward/fa2/store.cuh"
#include "backward/fa2/tile_part.cuh"
#include "backward/common/passes.cuh"
#include "backward/common/query_walk.cuh"
#include "backward/common/tickets.cuh"
#include "mma/copy.cuh"

KERNEL __launch_bounds__(PASS_THREADS) fa2_backward_prepare(const __grid_constant__ KernelParams p) {
  if (found_tickets<PASS_THREADS>(p)) return;
  prepare_strip(p);
  zero_score_gradients<PASS_THREADS>(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_backward(const __grid_constant__ KernelParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int key_group = warp / PARTS, part = warp % PARTS;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  PhaseLog inside(p.trace, lane == 0, blockIdx.x, COPY);

  // Alg. 2, l. 5
  const KeyItem item = key_item<Bc>(p, blockIdx.x, 6 * HEAD_DIM + 2 * V_DIM);
  const auto sequence = sequence_of(p, item.batch);
  if (LENGTHS_KIND == PACKED && item.k_block * Bc >= sequence.stored_keys()) return;  // the key block lies past its sequence
  const HeadMask mask = head_mask(p, sequence);
  const TileRange tiles = visited_queries<Br, Bc>(mask, item.k_block);
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  const BackwardWorkspace workspace(p);
  const int first_key = item.k_block * Bc, valid_keys = sequence.keys() - first_key;
  const int group_size = p.heads / p.kv_heads, first_head = item.kv_head * group_size;
  const i64 batch_head = i64(sequence.batch()) * p.heads;
  const int first_strip = LENGTHS_KIND == PACKED ? first_packed_block<STRIP>(int(sequence.first_row()), item.batch) : 0;
  const u32 first_ticket = LENGTHS_KIND == PACKED ? first_packed_block<Br>(int(sequence.first_row()), item.batch) : 0;
  const DqTickets<Br, Bc> tickets{p, workspace, item.k_block, batch_head, &mask, first_ticket, item.batch};

  const u32 smem_base = smem_address(smem);
  const u32 K_smem = smem_base + SharedMemory::K, V_smem = smem_base + SharedMemory::V, Q_smem = smem_base + SharedMemory::Q;
  const u32 dO_smem = smem_base + SharedMemory::DO, rows_smem = smem_base + SharedMemory::ROWS;
  const u32 P_smem = smem_base + SharedMemory::P, dS_smem = smem_base + SharedMemory::DS;
  // If registers are scarce, the sequence's mask is parked in the last 16 bytes of K's first row, which no tile uses.
  const u32 parked_smem = K_smem + PITCH - 16;
  constexpr bool PARK_MASK = LENGTHS_KIND != DENSE && !IRREGULAR && !(SHARED_KEYS && NUM_STAGES == 2);
  if (PARK_MASK && thread == 0) {
    st_shared_vec4(parked_smem, {u32(mask.rows), u32(mask.keys), u32(mask.first), u32(mask.last)});
  }
  // Under an irregular mask, the work item is parked there.
  if (IRREGULAR && thread == 0) st_shared_vec4(parked_smem, {u32(item.k_block), u32(item.kv_head), u32(item.batch), 0});
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
  // The first columns of dK, and of dQ, of this warp. If the head dim is not a multiple of all shares, the last warps
  // start earlier and recompute columns of other warps.
  const int first_tile = min(part * K_TILES, D_TILES - K_TILES);
  const int dq_row = warp % DQ_ROW_WARPS * 32, dq_share = warp / DQ_ROW_WARPS * DQ_TILES;
  const int first_dq_tile = min(dq_share, D_TILES - DQ_TILES);
  auto adds_first = [&] { return !STAGGERED || thread_id() < NUM_THREADS / 2; };

  // Alg. 2, l. 7
  float dK_rmem[KEY_TILES][K_TILES][4] = {}, dV_rmem[KEY_TILES][V_TILES][4] = {};

  // Alg. 2, l. 9, asynchronously, in K_STEPS parts: Q, dO, L and D of one tile. Rows past the end become zeros, which add nothing
  // to dK and dV, although their P is exp2(0 - 0) = 1.
  struct TileCopy {
    const char *Q, *dO, *stats;  // the first row of the tile
    u32 stage;
    int valid_rows, thread;
  };
  auto copy_of = [&](QueryTile tile, u32 stage, bool valid) -> TileCopy {
    const int row = tile.q_tile * Br;
    return {static_cast<const char*>(p.q) + 2 * (sequence.batch() * p.q_stride.batch + tile.head * p.q_stride.head +
                                                 (sequence.first_row() + row) * p.q_stride.seq),
            static_cast<const char*>(p.dout) + 2 * (sequence.batch() * p.dout_stride.batch + tile.head * p.dout_stride.head +
                                                    (sequence.first_row() + row) * p.dout_stride.seq),
            workspace.rows + (row_stats_index(p, sequence, batch_head + tile.head) + row) * ROW_STATS_BYTES, stage,
            valid ? sequence.rows() - row : 0, thread_id()};
  };
  auto copy_part = [&](const TileCopy& copy, int x) {
    copy_tile_part<Br, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(  //
        x, Q_smem + copy.stage * STAGE_BYTES, copy.Q, p.q_stride.seq * 2, copy.valid_rows, copy.thread);
    copy_tile_part<Br, V_ROW_BYTES, V_PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(  //
        x, dO_smem + copy.stage * DO_STAGE_BYTES, copy.dO, p.dout_stride.seq * 2, copy.valid_rows, copy.thread);
    if (x == 0 && copy.thread < Br) {
      cp_async_small<ROW_STATS_BYTES>(rows_smem + copy.stage * TILE_STATS_BYTES + copy.thread * ROW_STATS_BYTES,
                                       copy.stats + copy.thread * ROW_STATS_BYTES, copy.thread < copy.valid_rows);
    }
  };
  auto copy_tile = [&](QueryTile tile, u32 stage) {
    const TileCopy copy = copy_of(tile, stage, true);
#pragma unroll
    for (int x = 0; x < K_STEPS; ++x) copy_part(copy, x);
  };

  // Irregular masks: the current tile, the next tile and the previous tile, and the number of visited tiles.
  QueryWalk query_walk;
  WalkedTile walked{-1}, walked_next{-1};
  int walked_head = first_head;
  QueryTile before{first_head, 0}, passed{first_head, 0};  // the two tiles before the current one
  u32 visited = 0;
  TileTally tally;
  auto find_next = [&](const KeyItem& item) {
    walked_next = query_walk.next(p, item.k_block, item.batch, item.kv_head);
  };
  auto upcoming = [&] { return QueryTile{first_head + query_walk.head, walked_next.tile()}; };

  // Alg. 2, l. 10-14 and 16 for one query tile; dS stays in shared memory for add_dq().
  auto visit_tile = [&](QueryTile tile, u32 stage, auto copy_next) {
    const bool masked = IRREGULAR ? walked.masked() || (parked_item().k_block + 1) * Bc > sequence.keys()
                                  : tile.q_tile < tiles.clear_first || tile.q_tile >= tiles.clear_end || valid_keys < Bc;
    const u32 Q = Q_smem + stage * STAGE_BYTES, dO = dO_smem + stage * DO_STAGE_BYTES;
    const u32 P_keys = P_smem + warp_keys * S_PITCH, dS_keys = dS_smem + stage * TILE_BYTES + warp_keys * S_PITCH;
    visit_query_tile(p, sequence, item, tile, stage, masked, Q, dO, P_keys, dS_keys, K_smem, V_smem, rows_smem, rows_first,
                     columns_first, warp_keys, key_group, part, first_tile, first_key, lane, dK_rmem, dV_rmem, parked_item,
                     mask_of_head, copy_next, inside, query_tile_stamp(tile.head, tile.q_tile));
  };

  // Alg. 2, l. 15: 32 rows and a share of the columns for each warp.
  auto add_dq = [&](QueryTile tile, u32 stage) {
    const int strip = (tile.q_tile * Br + dq_row) / STRIP;
    float* const dQ = workspace.strip(batch_head + tile.head, first_strip + strip) + first_dq_tile * ACCUMULATOR;
    const int strips = LENGTHS_KIND == PACKED ? (sequence.rows() - 1) / STRIP + 1 : workspace.strips;
    const u32 dS_lane = dS_smem + stage * TILE_BYTES + dq_row * 2 + lane_offset_columns_first<S_PITCH>(lane);
    const u32 K_lane = K_smem + first_dq_tile * 16 + rows_first;
    add_query_gradients(dQ, strip, strips, first_dq_tile, dq_share, dS_lane, K_lane, lane, inside,
                        query_tile_stamp(tile.head, tile.q_tile));
  };

  if constexpr (IRREGULAR) find_next(item);
  int remaining = IRREGULAR ? int(walked_next.exists()) : group_size * (tiles.end - tiles.first);  // IRREGULAR: 1 or 0
  QueryTile current{first_head, tiles.first};
  bool pending = false;  // `current` is not in dQ yet
  auto stage = [&] { return IRREGULAR ? visited % NUM_STAGES : u32(remaining % NUM_STAGES); };  // of `current`
  // DETERMINISTIC: the previous tile is in dQ, but its ticket is not yet passed on. Passing on waits until all additions have
  // arrived, so it follows S of the tile after next. The first of the warps that add late waits for tickets; the last warp passes
  // them on.
  bool passing = false;
  u32 count = 0;
  auto awaits = [&] { return thread_id() == NUM_THREADS / 2; };
  auto passes_on = [&] { return thread_id() == NUM_THREADS - 32; };
  if (remaining > 0) {
    if constexpr (HEAD_DIM % 16 != 0) {
      zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(K_smem, thread);
      zero_padding<NUM_STAGES * Br, ROW_BYTES, PITCH, NUM_THREADS>(Q_smem, thread);
    }
    if constexpr (V_DIM % 16 != 0) {
      zero_padding<Bc, V_ROW_BYTES, V_PITCH, NUM_THREADS>(V_smem, thread);
      zero_padding<NUM_STAGES * Br, V_ROW_BYTES, V_PITCH, NUM_THREADS>(dO_smem, thread);
    }
    // Alg. 2, l. 6
    const char* K = static_cast<const char*>(p.k) +
                    2 * (sequence.batch() * p.k_stride.batch + item.kv_head * p.k_stride.head +
                         (sequence.first_key() + first_key) * p.k_stride.seq);
    const char* V = static_cast<const char*>(p.v) +
                    2 * (sequence.batch() * p.v_stride.batch + item.kv_head * p.v_stride.head +
                         (sequence.first_key() + first_key) * p.v_stride.seq);
    copy_tile_async<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(K_smem, K, p.k_stride.seq * 2, valid_keys, thread);
    copy_tile_async<Bc, V_ROW_BYTES, V_PITCH, NUM_THREADS, ALIGNMENT, true>(V_smem, V, p.v_stride.seq * 2, valid_keys, thread);
    if constexpr (NUM_STAGES == 2) {
      copy_tile(IRREGULAR ? upcoming() : current, IRREGULAR ? 1 : (remaining - 1) % 2);
    }
    cp_async_commit();
  }

  // Alg. 2, l. 8
  for (;;) {
    inside.enter(WAIT_DATA, NO_TILE);
    cp_async_wait<0>();
    if constexpr (IRREGULAR) {  // recomputed from the walk: no registers between tiles
      current = {walked_head, walked.tile()};
      remaining = walked_next.exists();
    }
    if (DETERMINISTIC) inside.enter(WAIT_TURN, NO_TILE);
    if (DETERMINISTIC && pending && awaits()) tickets.await(current, count);
    // All warps are done with the previous tile and have written its dS. With two stages, the next tile has landed for all
    // threads.
    block_sync();
    inside.enter(NOTHING);
    if constexpr (NUM_STAGES == 1) {
      if (remaining > 0) {
        copy_tile(IRREGULAR ? upcoming() : pending ? current.next(tiles) : current, 0);
        cp_async_commit();
      }
    }
    if (pending && (adds_first() || remaining == 0)) add_dq(current, stage());
    if (remaining == 0) break;
    if constexpr (NUM_STAGES == 1) {
      await_copies<0>(inside, NO_TILE, NOTHING);  // the tile has landed for all threads, and all warps have read dS
    }
    if constexpr (IRREGULAR) {
      passed = before, before = current, walked_head = upcoming().head, walked = walked_next;
      if (TRACE && walked_head == first_head) tally.count(walked.tile(), walked.masked());
      ++visited;
      find_next(parked_item());
      current = {walked_head, walked.tile()};
      remaining = walked_next.exists();
    } else {
      if (pending) current = current.next(tiles);
      --remaining;
    }
    const TileCopy copy = copy_of(IRREGULAR ? upcoming() : current.next(tiles), stage() ^ 1, remaining > 0);
    if (DETERMINISTIC && awaits()) count = tickets.count(current);  // read long before it is needed
    visit_tile(current, stage(), [&](int x) {
      if (NUM_STAGES == 2) copy_part(copy, x);  // after the last tile nothing is read
      if (DETERMINISTIC && x == K_STEPS - 1 && passing && passes_on()) {
        tickets.pass_on(IRREGULAR ? passed : current.previous(tiles).previous(tiles));
      }
    });
    cp_async_commit();
    if (pending && !adds_first()) add_dq(IRREGULAR ? before : current.previous(tiles), stage() ^ 1);
    passing = pending;
    pending = true;
  }

  inside.enter(STORE);
  // Alg. 2, l. 18: dK and dV overwrite this warp's keys of K and V.
  block_sync();  // no warp reads K any more
  // Loaded again: registers are scarce.
  const KeyItem own = IRREGULAR ? parked_item() : item;
  const auto ended = sequence_of(p, own.batch);
  const int own_key = IRREGULAR ? own.k_block * Bc : first_key, own_keys = IRREGULAR ? ended.keys() - own_key : valid_keys;
  const int stored_keys = LENGTHS_KIND == DENSE ? own_keys : ended.stored_keys() - own_key;
  if (DETERMINISTIC && pending && passes_on()) {
    if (passing) tickets.pass_on(IRREGULAR ? before : current.previous(tiles));
    tickets.pass_on(current);
  }
  store_gradients(p, own, ended, own_key, own_keys, stored_keys, K_smem, V_smem, warp_keys, key_group, part, first_tile, dK_rmem,
                  dV_rmem, lane);

  inside.close();
  if constexpr (TRACE) {
    block_sync();  // the trace record ends when the last warp has stored
    const TileRange traced = IRREGULAR ? tally.range(tiles.total) : tiles;
    const bool exists = LENGTHS_KIND == DENSE || valid_keys > 0;
    if (thread == 0 && exists) write_trace(p, blockIdx.x, {item.k_block, item.kv_head, item.batch}, traced, start_ns);
  }
}

KERNEL __launch_bounds__(PASS_THREADS, 8) fa2_backward_convert(const __grid_constant__ KernelParams p) {
  convert_strip(p);
  round_score_gradients<PASS_THREADS>(p);
}
