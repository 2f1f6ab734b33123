// What the passes before and after the key blocks do (backward/common/passes.cuh), done while these are computed: by two warps of
// the producer of each thread block, for all groups of heads (HeadGroups) but the first and the last ones. It is work for
// memory, and key blocks are work for the tensor cores; and dQ of a group lies in the L2 cache from its zeros to its conversion.
//
// Groups follow one another: while group g is added to, the next one that the pass before has left is prepared; then, once all key
// blocks of g - 1 have been added, it is converted. Nobody waits in a circle: key blocks of group g wait for its strips; who
// prepares these has converted groups up to g - groups_before - 2, and so waited for the key blocks of g - 3 and earlier ones. A
// block tells of those when it begins one that is two groups further, at the latest, before it waits for that.
//
// In the words of PTX's memory model: the zeros and numbers of a strip happen before its release of PREPARED, which the loaders'
// acquire synchronises with; from them barriers lead to whoever adds. Additions of a warp by the copy engine have ended before its
// release of ADDED, and those by its lanes happen before it; the acquire here synchronises with it. By a fence of the loaders the
// copy engine sees zeros and numbers, too.
#pragma once
#include "primitives/primitives.cuh"
#include "backward/fa3_common/block.cuh"

constexpr int WORKERS = 2, SLOTS = 2;              // warps, and strips that each has in shared memory
constexpr int STRIP_BYTES = STRIP * HEAD_DIM * 4;  // of dQ in float32; or of O and dO
constexpr int BATCH_STRIPS = 4;  // neighbours that a warp takes one after another
static_assert(!RUNS_ON || BACKGROUND_BYTES >= WORKERS * SLOTS * STRIP_BYTES, "a slot a strip");
static_assert(!RUNS_ON || TILE_STRIPS % BATCH_STRIPS == 0, "strips of a batch are of one head");

// By every thread of the pass before: what is counted begins, with the first groups prepared.
DEVICE void prepare_counters(const BackwardParams& p) {
  if constexpr (!RUNS_ON) return;
  const BackwardWorkspace workspace(p);
  const HeadGroups groups{p};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    st_global(where_counters_begin(p), u32(workspace.counters - static_cast<const u32*>(p.workspace)));
  }
  const u32 prepared = groups.end(u32(p.groups_before) - 1);
  for (u32 head = blockIdx.x * PASS_THREADS + threadIdx.x; head < groups.heads(); head += gridDim.x * PASS_THREADS) {
    st_global(workspace.counter(p, PREPARED, head), head < prepared ? groups.strips() : 0u);
    st_global(workspace.counter(p, ADDED, head), 0u);
    st_global(workspace.counter(p, TO_PREPARE, head), 0u);
    st_global(workspace.counter(p, TO_CONVERT, head), 0u);
  }
}

// By one of WORKERS warps.
struct Background {
  const BackwardParams& p;
  const u32 start;  // of the shared memory

  DEVICE static u32 worker() { return opaque(threadIdx.x) / 96; }
  DEVICE u32 slot(u32 i) const { return opaque(start) + BACKGROUND_OFFSET + (worker() * SLOTS + i % SLOTS) * STRIP_BYTES; }

  DEVICE void run() {
    grid_await_previous();
#pragma unroll 1
    for (u32 g = 0; g <= u32(p.whole_groups); ++g) {
      if (g + u32(p.groups_before) <= u32(p.whole_groups)) visit<false>(g + u32(p.groups_before));
      if (g > 0 && g <= u32(p.groups_converted)) visit<true>(g - 1);
    }
  }

  // Batches of a group's strips, as long as there are some. Taken by who is there: if each thread block had its share, all would
  // wait for one that finds no SM before they end. A strip is asked for while the one before is worked on, and a batch is taken
  // while the one before is: its number is looked at when that ends.
  template <bool CONVERTS>
  DEVICE void visit(u32 group) {
    if constexpr (CONVERTS) await_added(opaque(group));
    u32 taken = take<CONVERTS>(group), s;
    if (!has_batch(group, taken, s)) return;
    taken = take<CONVERTS>(group);
    float lse = ask<CONVERTS>(opaque(s), slot(0));
#pragma unroll 1
    for (u32 i = 0;; ++i) {
      u32 next = s + 1;
      bool more = true;
      if (next % BATCH_STRIPS == 0) {
        more = has_batch(opaque(group), taken, next);
        if (more) taken = take<CONVERTS>(opaque(group));
      }
      float next_lse = 0.0f;
      if (more) {
        next_lse = ask<CONVERTS>(opaque(next), slot(i + 1));
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      warp_sync();  // what all lanes have asked for is there
      if constexpr (CONVERTS) {
        convert(opaque(s), slot(i));
      } else {
        prepare(opaque(s), slot(i), lse);
      }
      warp_sync();  // it has been read, and all lanes have written theirs
      if (!CONVERTS && s % BATCH_STRIPS == BATCH_STRIPS - 1 && lane_id() == 0) {
        red_release_gpu_add(counter(PREPARED, opaque(s) / HeadGroups{p}.strips()), BATCH_STRIPS);
      }
      if (!more) return;
      s = next;
      lse = next_lse;
    }
  }

  // A batch's number, in lane 0.
  template <bool CONVERTS>
  DEVICE u32 take(u32 group) const {
    u32 taken = 0;
    if (lane_id() == 0) taken = atomic_add(counter(CONVERTS ? TO_CONVERT : TO_PREPARE, group), 1);
    return taken;
  }
  // Whether a group has so many, and where the batch begins.
  DEVICE bool has_batch(u32 group, u32 taken, u32& strip) const {
    const HeadGroups groups{p};
    strip = groups.first(group) * groups.strips() + shfl(taken, 0) * BATCH_STRIPS;
    return strip < groups.end(group) * groups.strips();
  }
  DEVICE u32* counter(Counter which, u32 i) const { return ::counter(p, which, i); }
  DEVICE u32 strips() const { return (u32(opaque(p.seqlen_q) - 1) / BLOCK_Q + 1) * TILE_STRIPS; }  // of a head

  DEVICE void await_added(u32 group) const {
    const HeadGroups groups{p};
    const u32 heads = groups.end(group) - groups.first(group);
    const u32 wanted = heads * (u32(p.seqlen_k - 1) / Bc + 1) * (4 * CONSUMERS);
    if (lane_id() == 0) {
      const u32* const added = counter(ADDED, group);
      while (ld_acquire_gpu(added) != wanted) {
      }
    }
    warp_sync();
  }

  // What a strip is worked out from; its rows' LSE comes in a register.
  template <bool CONVERTS>
  DEVICE float ask(u32 strip, u32 target) const {
    float lse = 0.0f;
    if constexpr (CONVERTS) {
      const u32 lane = opaque(lane_id());
      const float* const source = BackwardWorkspace(p).strip(i64(strip)) + lane * 4;
#pragma unroll 4
      for (int n = 0; n < D_TILES; ++n) cp_async_16(target + lane * 16 + n * (ACCUMULATOR * 4), source + n * ACCUMULATOR, true);
    } else {
      const u32 head = strip / strips(), row = strip % strips() * STRIP;
      ask_for_rows(head_address(p.dout, p.dout_stride, int(head / u32(p.heads)), int(head % u32(p.heads))), p.dout_stride.seq * 2,
                   row, target);
      ask_for_rows(head_address(p.o, p.o_stride, int(head / u32(p.heads)), int(head % u32(p.heads))), p.o_stride.seq * 2, row,
                   target + STRIP * HEAD_DIM * 2);
      const u32 own = row + opaque(lane_id());
      if (lane_id() < STRIP && own < u32(p.seqlen_q)) lse = ld_global<float>(p.lse + i64(head) * p.seqlen_q + own);
    }
    cp_async_commit();
    return lse;
  }
  DEVICE void ask_for_rows(const char* head, i64 pitch, u32 row, u32 target) const {
#pragma unroll 1
    for (u32 u = opaque(lane_id()); u < STRIP * ROW_UNITS; u += 32) {
      const u32 r = row + u / ROW_UNITS;
      if (r < u32(p.seqlen_q)) cp_async_16(target + u * 16, head + r * pitch + u % ROW_UNITS * 16, true);
    }
  }

  struct Slot {
    const BackwardParams& p;
    u32 place;
    float lse;  // of the lane's row
    DEVICE vec4 unit(int which, u32 row, int unit) const {
      return ld_shared_vec4(place + (u32(which) * STRIP + row % STRIP) * (HEAD_DIM * 2) + unit * 16);
    }
    DEVICE float number(int which, i64 at) const { return which == 0 ? lse : ld_global<float>(p.dlse + at); }
  };
  DEVICE void prepare(u32 strip, u32 place, float lse) const {
    prepare_strip<ROW_UNITS == ROW_LANES ? 2 : 1>(p, BackwardWorkspace(p), StripItem(strip, strips()), Slot{p, place, lse},
                                                     int(opaque(lane_id())));
  }
  // Registers are few: each lane converts what it has of an accumulator, two neighbours of two rows.
  DEVICE void convert(u32 strip, u32 place) const {
    const u32 head = strip / strips(), lane = opaque(lane_id()), row = strip % strips() * STRIP + lane / 4, below = opaque(row + 8);
    char* const of_head = head_address(p.dq, p.dq_stride, int(head / u32(p.heads)), int(head % u32(p.heads))) + lane % 4 * 4;
    char* const target = of_head + i64(row) * p.dq_stride.seq * 2;
    char* const lower = of_head + i64(below) * p.dq_stride.seq * 2;
    const bool has_upper = row < u32(p.seqlen_q), has_lower = below < u32(p.seqlen_q);
#pragma unroll 2
    for (int n = 0; n < D_TILES; ++n) {
      const vec4 v = ld_shared_vec4(place + n * (ACCUMULATOR * 4) + lane * 16);
      if (has_upper) st_global(target + n * 16, Element::pack(u32_as_float(v.x) * p.scale, u32_as_float(v.y) * p.scale));
      if (has_lower) st_global(lower + n * 16, Element::pack(u32_as_float(v.z) * p.scale, u32_as_float(v.w) * p.scale));
    }
  }
};
