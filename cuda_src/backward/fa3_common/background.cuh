// The prepare and convert passes (backward/common/passes.cuh) of all head batches but the first and the last ones: by two warps
// of the producer of each persistent block, concurrently with its key blocks. Passes are work for memory, key blocks are work for
// the tensor cores; and dQ of a head batch stays in the L2 cache from its zeros to its conversion.
//
// While key blocks add to head batch g, head batch g + head_batches_before is prepared. Then, once all key blocks of g - 1 have
// been added, g - 1 is converted. There is no cycle of waits: key blocks of g wait for the strips of g; the warps that prepare
// these strips have converted up to g - head_batches_before - 2, and so waited for the key blocks of g - 3 and earlier ones. A
// thread block publishes its additions to a head batch before it waits for a tile two or more head batches later.
//
// In the words of PTX's memory model: the zeros and row statistics of a strip happen before its release of PREPARED, with which
// the loaders' acquire synchronises; mbarriers lead from the loaders to the consumers that add. Additions by the copy engine have
// completed before the warp's release of ADDED, and additions by its lanes happen before it; the acquire here synchronises with
// that release. A proxy fence of the loaders makes zeros and row statistics visible to the copy engine.
#pragma once
#include "backward/fa3_common/items.cuh"
#include "primitives/cp_async.cuh"

constexpr int STRIP_BYTES = STRIP * HEAD_DIM * 4;  // of dQ in float32; or of O and dO
constexpr int RUN_STRIPS = 4;                      // a run: adjacent strips that a warp takes at a time
static_assert(!IS_PERSISTENT || TILE_STRIPS % RUN_STRIPS == 0, "a run of strips lies in one head");

// By every thread of the prepare pass: initialises the counters; the first head batches count as prepared.
DEVICE void prepare_counters(const KernelParams& p) {
  if constexpr (!IS_PERSISTENT) return;
  const BackwardWorkspace workspace(p);
  const HeadBatches batches{p};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    st_global(where_counters_begin(p), u32(workspace.counters - static_cast<const u32*>(p.workspace)));
  }
  const u32 prepared = batches.end(u32(p.head_batches_before) - 1);
  for (u32 head = blockIdx.x * PASS_THREADS + threadIdx.x; head < batches.heads(); head += gridDim.x * PASS_THREADS) {
    st_global(workspace.counter(p, PREPARED, head), head < prepared ? batches.strips_of_kv_head() : 0u);
    st_global(workspace.counter(p, ADDED, head), 0u);
    st_global(workspace.counter(p, TO_PREPARE, head), 0u);
    st_global(workspace.counter(p, TO_CONVERT, head), 0u);
  }
}

// By one of BACKGROUND_WARPS warps.
struct Background {
  const KernelParams& p;
  const u32 start;  // of the shared memory

  DEVICE static u32 worker() { return opaque(threadIdx.x) / 96; }
  DEVICE u32 slot(u32 i) const {
    return opaque(start) + SharedMemory::BACKGROUND + (worker() * BACKGROUND_SLOTS + i % BACKGROUND_SLOTS) * STRIP_BYTES;
  }

  DEVICE void run() {
    grid_await_previous();
#pragma unroll 1
    for (u32 g = 0; g <= u32(p.whole_head_batches); ++g) {
      if (g + u32(p.head_batches_before) <= u32(p.whole_head_batches)) visit<false>(g + u32(p.head_batches_before));
      if (g > 0 && g <= u32(p.head_batches_converted)) visit<true>(g - 1);
    }
  }

  // Works on runs of a head batch's strips, until none is left. Warps take runs by a counter: with fixed shares, all blocks would
  // wait for a block that becomes resident only when another ends. While a strip is worked on, the next strip is loaded; while a
  // run is worked on, the number of the next run is requested.
  template <bool CONVERTS>
  DEVICE void visit(u32 head_batch) {
    if constexpr (CONVERTS) await_added(opaque(head_batch));
    u32 taken = take<CONVERTS>(head_batch), s;
    if (!has_run(head_batch, taken, s)) return;
    taken = take<CONVERTS>(head_batch);
    float lse = load<CONVERTS>(opaque(s), slot(0));
#pragma unroll 1
    for (u32 i = 0;; ++i) {
      u32 next = s + 1;
      bool more = true;
      if (next % RUN_STRIPS == 0) {
        more = has_run(opaque(head_batch), taken, next);
        if (more) taken = take<CONVERTS>(opaque(head_batch));
      }
      float next_lse = 0.0f;
      if (more) {
        next_lse = load<CONVERTS>(opaque(next), slot(i + 1));
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      warp_sync();  // the loads of all lanes have arrived
      if constexpr (CONVERTS) {
        convert(opaque(s), slot(i));
      } else {
        prepare(opaque(s), slot(i), lse);
      }
      warp_sync();  // all lanes have read the slot and written their results
      if (!CONVERTS && s % RUN_STRIPS == RUN_STRIPS - 1 && lane_id() == 0) {
        red_release_gpu_add(counter(p, PREPARED, opaque(s) / HeadBatches{p}.strips_of_kv_head()), RUN_STRIPS);
      }
      if (!more) return;
      s = next;
      lse = next_lse;
    }
  }

  // Takes the next run: its number, in lane 0.
  template <bool CONVERTS>
  DEVICE u32 take(u32 head_batch) const {
    u32 taken = 0;
    if (lane_id() == 0) taken = atomic_add(counter(p, CONVERTS ? TO_CONVERT : TO_PREPARE, head_batch), 1);
    return taken;
  }
  // Whether a head batch has run `taken`, and that run's first strip.
  DEVICE bool has_run(u32 head_batch, u32 taken, u32& strip) const {
    const HeadBatches batches{p};
    strip = batches.first(head_batch) * batches.strips_of_kv_head() + shfl(taken, 0) * RUN_STRIPS;
    return strip < batches.end(head_batch) * batches.strips_of_kv_head();
  }
  DEVICE u32 strips_of_query_head() const { return (u32(opaque(p.seqlen_q) - 1) / BLOCK_Q + 1) * TILE_STRIPS; }

  DEVICE void await_added(u32 head_batch) const {
    const HeadBatches batches{p};
    const u32 heads = batches.end(head_batch) - batches.first(head_batch);
    const u32 wanted = heads * (u32(p.seqlen_k - 1) / Bc + 1) * (4 * CONSUMERS);
    if (lane_id() == 0) {
      const u32* const added = counter(p, ADDED, head_batch);
      while (ld_acquire_gpu(added) != wanted) {
      }
    }
    warp_sync();
  }

  // Starts the loads of a strip: dQ, or O and dO. Returns the LSE of the lane's row.
  template <bool CONVERTS>
  DEVICE float load(u32 strip, u32 target) const {
    float lse = 0.0f;
    if constexpr (CONVERTS) {
      const u32 lane = opaque(lane_id());
      const float* const source = BackwardWorkspace(p).strip(i64(strip)) + lane * 4;
#pragma unroll 4
      for (int n = 0; n < D_TILES; ++n) cp_async_16(target + lane * 16 + n * (ACCUMULATOR * 4), source + n * ACCUMULATOR, true);
    } else {
      const u32 head = strip / strips_of_query_head(), row = strip % strips_of_query_head() * STRIP;
      load_rows(head_address(p.dout, p.dout_stride, int(head / u32(p.heads)), int(head % u32(p.heads))), p.dout_stride.seq * 2,
                   row, target);
      load_rows(head_address(p.o, p.o_stride, int(head / u32(p.heads)), int(head % u32(p.heads))), p.o_stride.seq * 2, row,
                   target + STRIP * HEAD_DIM * 2);
      const u32 own = row + opaque(lane_id());
      if (lane_id() < STRIP && own < u32(p.seqlen_q)) lse = ld_global<float>(p.lse + i64(head) * p.seqlen_q + own);
    }
    cp_async_commit();
    return lse;
  }
  DEVICE void load_rows(const char* head, i64 pitch, u32 row, u32 target) const {
#pragma unroll 1
    for (u32 u = opaque(lane_id()); u < STRIP * ROW_UNITS; u += 32) {
      const u32 r = row + u / ROW_UNITS;
      if (r < u32(p.seqlen_q)) cp_async_16(target + u * 16, head + r * pitch + u % ROW_UNITS * 16, true);
    }
  }

  struct Slot {
    const KernelParams& p;
    u32 place;
    float lse;  // of the lane's row
    DEVICE vec4 unit(int which, u32 row, int unit) const {
      return ld_shared_vec4(place + (u32(which) * STRIP + row % STRIP) * (HEAD_DIM * 2) + unit * 16);
    }
    DEVICE float stat(int which, i64 at) const { return which == 0 ? lse : ld_global<float>(p.dlse + at); }
  };
  DEVICE void prepare(u32 strip, u32 place, float lse) const {
    prepare_strip<ROW_UNITS == ROW_LANES ? 2 : 1>(p, BackwardWorkspace(p), StripItem(strip, strips_of_query_head()),
                                                  Slot{p, place, lse}, int(opaque(lane_id())));
  }
  // Takes few registers: each lane converts its four elements of an accumulator, two neighbours in each of two rows.
  DEVICE void convert(u32 strip, u32 place) const {
    const u32 head = strip / strips_of_query_head(), lane = opaque(lane_id());
    const u32 row = strip % strips_of_query_head() * STRIP + lane / 4;
    const u32 below = opaque(row + 8);
    constexpr int BYTES = DqElement::BYTES;
    char* const of_head =
        head_address<DqElement>(p.dq, p.dq_stride, int(head / u32(p.heads)), int(head % u32(p.heads))) + lane % 4 * (2 * BYTES);
    char* const target = of_head + i64(row) * p.dq_stride.seq * BYTES;
    char* const lower = of_head + i64(below) * p.dq_stride.seq * BYTES;
    const bool has_upper = row < u32(p.seqlen_q), has_lower = below < u32(p.seqlen_q);
#pragma unroll 2
    for (int n = 0; n < D_TILES; ++n) {
      const vec4 v = ld_shared_vec4(place + n * (ACCUMULATOR * 4) + lane * 16);
      if (has_upper) store_two<DqElement, 16>(target + n * 8 * BYTES, u32_as_float(v.x) * p.scale, u32_as_float(v.y) * p.scale);
      if (has_lower) store_two<DqElement, 16>(lower + n * 8 * BYTES, u32_as_float(v.z) * p.scale, u32_as_float(v.w) * p.scale);
    }
  }
};
