// The prepare and convert passes, launched before and after the key blocks of a backward kernel: one warp per row strip (16 query
// rows).
#pragma once
#include "backward/common/workspace.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/lanes.cuh"
#include "shared/schedule.cuh"
#include "shared/store_two.cuh"

constexpr int PASS_THREADS = 128;
constexpr int PASS_STRIPS = PASS_THREADS / 32;  // strips of one thread block
constexpr int ELEMENT_BYTES = Element::BYTES;
using DqElement = typename Choose<FLOAT32_DQ, Float32, Element>::type;
using DkvElement = typename Choose<FLOAT32_DKV, Float32, Element>::type;

// The strip of this warp.
DEVICE i64 strip_of_pass() { return i64(blockIdx.x) * PASS_STRIPS + threadIdx.x / 32; }

// A row strip of one head.
struct StripItem {
  i64 index;  // among the strips of all heads of the batch
  i64 head;  // over the batch; packed: over all sequences
  int strip;
  bool valid;
  int sequence = 0, strip_of_sequence = 0;  // LENGTHS: its sequence; PACKED: the strip among the strips of that sequence

  // A strip that exists, of dense arrays: 32-bit indices take fewer registers.
  DEVICE StripItem(u32 index_, u32 strips_of_head)
      : index(index_), head(index_ / strips_of_head), strip(int(index_ % strips_of_head)), valid(true) {}
  DEVICE StripItem(const BackwardParams& p, const BackwardWorkspace& workspace, i64 index_) : index(index_) {
    head = index / workspace.strips;
    strip = int(index % workspace.strips);
    valid = head < workspace.num_heads(p);
    if constexpr (LENGTHS_KIND == PACKED) {
      constexpr int BLOCK_STRIPS = WHOLE_TILES ? TILE_STRIPS : 1;
      const PackedBlock found =
          packed_block<BLOCK_STRIPS * STRIP>(p.cu_seqlens_q, p.batch, p.total_q, u32(strip) / BLOCK_STRIPS);
      sequence = found.sequence;
      strip_of_sequence = found.block * BLOCK_STRIPS + strip % BLOCK_STRIPS;
      valid = valid && i64(found.block) * (BLOCK_STRIPS * STRIP) < sequence_of(p, sequence).stored_rows();
    } else if constexpr (LENGTHS_KIND == PADDED) {
      if (valid) sequence = int(head / p.heads);
    }
  }

  // The strip's first row in its sequence.
  DEVICE i64 row() const { return i64(LENGTHS_KIND == PACKED ? strip_of_sequence : strip) * STRIP; }
};

// The first byte of a head of a tensor.
DEVICE const char* head_address(const void* tensor, const Strides& stride, int batch, int head) {
  return static_cast<const char*>(tensor) + ELEMENT_BYTES * (batch * stride.batch + head * stride.head);
}
template <typename Gradient>
DEVICE char* head_address(void* tensor, const Strides& stride, int batch, int head) {
  return static_cast<char*>(tensor) + Gradient::BYTES * (batch * stride.batch + head * stride.head);
}

// 16 bytes from or to global memory by accesses as wide as ALIGNMENT allows.
template <int ALIGNMENT>
DEVICE vec4 load_16_bytes(const char* global) {
  if constexpr (ALIGNMENT == 16) {
    return ld_global<vec4>(global);
  } else if constexpr (ALIGNMENT == 8) {
    const vec2 lo = ld_global<vec2>(global), hi = ld_global<vec2>(global + 8);
    return {lo.x, lo.y, hi.x, hi.y};
  } else {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (ALIGNMENT == 4) {
        words[i] = ld_global<u32>(global + 4 * i);
      } else {
        words[i] = ld_global<u16>(global + 4 * i) | u32(ld_global<u16>(global + 4 * i + 2)) << 16;
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}
template <int ALIGNMENT>
DEVICE void store_16_bytes(char* global, vec4 v) {
  if constexpr (ALIGNMENT == 16) {
    st_global(global, v);
  } else if constexpr (ALIGNMENT == 8) {
    st_global(global, vec2{v.x, v.y});
    st_global(global + 8, vec2{v.z, v.w});
  } else {
    store_pair<ALIGNMENT>(global, v.x);
    store_pair<ALIGNMENT>(global + 4, v.y);
    store_pair<ALIGNMENT>(global + 8, v.z);
    store_pair<ALIGNMENT>(global + 12, v.w);
  }
}

// Adds to `sum` the dot product of the elements in two 4-byte words.
template <typename Element>
DEVICE float dot_word(u32 a, u32 b, float sum) {
  if constexpr (Element::BYTES == 4) {
    return fmaf(u32_as_float(a), u32_as_float(b), sum);
  } else {
    sum = fmaf(Element::widen(u16(a)), Element::widen(u16(b)), sum);
    return fmaf(Element::widen(u16(a >> 16)), Element::widen(u16(b >> 16)), sum);
  }
}

// Algorithm 2, l. 3-4: zeros in dQ, and lse and delta of each row. A row that sees no key has lse = -inf. Its lse becomes 0, so
// that its P is exp2(-inf - 0) = 0; its delta becomes 0, because 0 * NaN is NaN. ROW_LANES lanes read a row, 16 bytes each,
// ROWS_AT_ONCE rows at a time.
constexpr int ROW_UNITS = V_DIM * ELEMENT_BYTES / 16;
constexpr int ROW_LANES = ROW_UNITS <= 2 ? 2 : ROW_UNITS <= 4 ? 4 : ROW_UNITS <= 8 ? 8 : ROW_UNITS <= 16 ? 16 : 32;
constexpr int ROWS_AT_ONCE = 32 / ROW_LANES;

// DETERMINISTIC: sets the ticket counters of query tile `tile`, an index over all heads.
DEVICE void set_tickets(const BackwardParams& p, const BackwardWorkspace& workspace, i64 tile, u32 count) {
  if constexpr (WHOLE_TILES) {
    st_global(workspace.ticket(p, u32(tile)), vec2{count, count});
  } else {
    st_global(workspace.tickets + tile, count);
  }
}

// Whether packed lengths do not begin at 0, or fall: nothing has checked them. Blocks of such sequences overlap or are missing.
// By a warp.
DEVICE bool fall_somewhere(const BackwardParams& p, int lane) {
  bool falls = false;
  for (int b = lane; b < p.batch; b += 32) {
    const auto sequence = sequence_of(p, b);
    const bool rows = sequence.first_row() + sequence.rows() == sequence_of(p, b + 1).first_row();
    const bool keys = sequence.first_key() + sequence.keys() == sequence_of(p, b + 1).first_key();
    falls = falls || !rows || !keys || (b == 0 && sequence.first_row() + sequence.first_key() != 0);
  }
  return warp_any(falls);
}

// By a warp; each lane loads up to IN_FLIGHT rows at a time. `source` has unit(which, row, unit): 16 bytes of a row of dO (0) or
// O (1); and stat(which, at): the LSE (0) or its gradient (1) of one row per lane.
template <int IN_FLIGHT, typename Source>
DEVICE void prepare_strip(const BackwardParams& p, const BackwardWorkspace& workspace, const StripItem& item,
                          const Source& source, int lane) {
  constexpr int UNITS = ROW_UNITS, LANES = ROW_LANES, ROWS = ROWS_AT_ONCE;
  const int unit = lane % LANES;
  const auto sequence = sequence_of(p, item.sequence);
  bool unordered = false;
  if constexpr (DETERMINISTIC && LENGTHS_KIND == PACKED) {
    unordered = fall_somewhere(p, lane);
    if (unordered && lane == 0 && item.head < p.heads && u32(item.strip) < workspace.tiles(p)) {
      set_tickets(p, workspace, item.head * workspace.tiles(p) + item.strip, UNORDERED);
    }
  }
  if (item.valid) {
    vec4* zeros = reinterpret_cast<vec4*>(workspace.strip(item.index)) + lane;
#pragma unroll 8
    for (int n = 0; n < STRIP_FLOATS / ACCUMULATOR; ++n) st_global(zeros + n * (ACCUMULATOR / 4), vec4{0, 0, 0, 0});
    const int strip = LENGTHS_KIND == PACKED ? item.strip_of_sequence : item.strip;
    if (DETERMINISTIC && !unordered && lane == 0 && strip * STRIP % BLOCK_Q == 0) {
      i64 tile = item.head * ((p.seqlen_q - 1) / BLOCK_Q + 1) + strip * STRIP / BLOCK_Q;
      if constexpr (LENGTHS_KIND == PACKED) {
        tile = item.head * workspace.tiles(p) + strip * STRIP / BLOCK_Q +
               first_packed_block<BLOCK_Q>(int(sequence.first_row()), sequence.sequence_index);
      }
      set_tickets(p, workspace, tile, 0);
    }
  }
  // One lane per row loads its LSE and the gradient of its LSE.
  const u32 first_row = u32(item.row()), rows = item.valid ? u32(sequence.rows()) : 0, row = first_row + lane;
  const bool here = lane < STRIP && row < rows;
  const i64 at = row_stats_index(p, sequence, item.head) + row;
  const float lse = here ? source.stat(0, at) : 0.0f, dlse = here && p.dlse != nullptr ? source.stat(1, at) : 0.0f;
  // Algorithm 2, l. 4: D = rowsum(dO * O).
  float delta = 0.0f;
#pragma unroll(STRIP / ROWS < IN_FLIGHT ? STRIP / ROWS : IN_FLIGHT)
  for (int pass = 0; pass < STRIP / ROWS; ++pass) {
    const u32 row = first_row + pass * ROWS + lane / LANES;
    float sum = 0.0f;
#pragma unroll
    for (int x = 0; x < UNITS; x += LANES) {
      if (row < rows && x + unit < UNITS) {
        const vec4 a = source.unit(0, row, x + unit), b = source.unit(1, row, x + unit);
        sum = dot_word<Element>(a.y, b.y, dot_word<Element>(a.x, b.x, sum));
        sum = dot_word<Element>(a.w, b.w, dot_word<Element>(a.z, b.z, sum));
      }
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) sum += shfl_xor(sum, distance);
    const float of_row = u32_as_float(shfl(float_as_u32(sum), lane % ROWS * LANES));
    if (lane / ROWS == pass) delta = of_row - dlse;
  }
  const bool blind = lse == NEG_INF;
  const float L = blind ? 0.0f : lse * (ELEMENT_BYTES == 4 ? 1.0f : LOG2_E), D = blind ? 0.0f : delta;
  if constexpr (WHOLE_TILES) {
    if (item.valid && lane < STRIP) {
      float* const stats = workspace.lse(item.index) + lane;
      st_global(stats, here ? L : -NEG_INF);  // rows past the end: their P is exp2(0 - inf) = 0
      st_global(stats + BLOCK_Q, here ? -D : 0.0f);
    }
  } else if (here) {
    st_global(workspace.rows + at * ROW_STATS_BYTES, vec2{float_as_u32(L), float_as_u32(D)});
  }
  if constexpr (SINK) {
    float of_sink = here && !blind ? ex2((load_sink(p.sink + item.head % p.heads) - lse) * LOG2_E) * delta : 0.0f;
    of_sink = warp_sum(of_sink);
    if (lane == 0 && item.head < workspace.num_heads(p)) {
      st_global(workspace.sinks + item.head * workspace.strips + item.strip, of_sink);
    }
  }
}

struct StripInMemory {
  const BackwardParams& p;
  const char *dO, *O;  // the first row of the sequence

  DEVICE StripInMemory(const BackwardParams& p_, const StripItem& item) : p(p_) {
    const int head = int(item.head % p.heads), batch = int(item.head / p.heads);
    const i64 row = sequence_of(p, item.sequence).first_row();
    dO = head_address(p.dout, p.dout_stride, batch, head) + row * (p.dout_stride.seq * ELEMENT_BYTES);
    O = head_address(p.o, p.o_stride, batch, head) + row * (p.o_stride.seq * ELEMENT_BYTES);
  }
  DEVICE vec4 unit(int which, u32 row, int unit) const {
    const i64 pitch = (which == 0 ? p.dout_stride : p.o_stride).seq * ELEMENT_BYTES;
    return load_16_bytes<ALIGNMENT>((which == 0 ? dO : O) + row * pitch + unit * 16);
  }
  DEVICE float stat(int which, i64 at) const { return ld_global<float>((which == 0 ? p.lse : p.dlse) + at); }
};

// The prepare pass.
DEVICE void prepare_strip(const BackwardParams& p) {
  const BackwardWorkspace workspace(p);
  const StripItem item(p, workspace, strip_of_pass());
  if (WHOLE_TILES && blockIdx.x == 0 && threadIdx.x == 0) st_global(workspace.next, u32(0));
  prepare_strip<8>(p, workspace, item, StripInMemory(p, item), threadIdx.x % 32);
}

// The gradient of a sink: the sum over all strips of its head, in a fixed order. One warp per head.
DEVICE void sum_sinks(const BackwardParams& p, const BackwardWorkspace& workspace) {
  const i64 head = i64(blockIdx.x) * PASS_STRIPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (head >= p.heads) return;
  float sum = 0.0f;
  for (i64 h = head; h < workspace.num_heads(p); h += p.heads) {
    for (int strip = lane; strip < workspace.strips; strip += 32) {
      sum += ld_global<float>(workspace.sinks + h * workspace.strips + strip);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) st_global(p.dsink + head, -sum);
}

// Columns 2t and 2t + 1 of a row into its words.
template <typename Element>
DEVICE void pack_two(u32 (&words)[8], int t, float x, float y) {
  if constexpr (Element::BYTES == 4) {
    words[2 * t] = float_as_u32(x);
    words[2 * t + 1] = float_as_u32(y);
  } else {
    words[t] = Element::pack(x, y);
  }
}

// The convert pass, from strip `first` on: writes dQ row by row, scaled and rounded. Eight lanes share an accumulator: each reads
// 64 bytes, eight columns of two rows.
DEVICE void convert_strip(const BackwardParams& p, i64 first = 0) {
  const BackwardWorkspace workspace(p);
  const StripItem item(p, workspace, first + strip_of_pass());
  const int lane = threadIdx.x % 32, g = lane % 8;
  if constexpr (SINK) sum_sinks(p, workspace);
  if (!item.valid) return;
  const int head = int(item.head % p.heads), batch = int(item.head / p.heads);
  const auto sequence = sequence_of(p, item.sequence);
  constexpr int BYTES = DqElement::BYTES;
  char* dQ = head_address<DqElement>(p.dq, p.dq_stride, batch, head) + sequence.first_row() * (p.dq_stride.seq * BYTES);
  const float* source = workspace.strip(item.index);
#pragma unroll(D_TILES >= 16 ? 4 : 1)
  for (int n = lane / 8; n < D_TILES; n += 4) {
    float d[4][4];  // values of lanes 4g ... 4g + 3: see accumulator_place()
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int place = WIDE_ADDITIONS ? (4 * g + x) * 4 : x * 32 + 4 * g;
      const vec4 v = ld_global<vec4>(source + n * ACCUMULATOR + place);
      const float four[4] = {u32_as_float(v.x), u32_as_float(v.y), u32_as_float(v.z), u32_as_float(v.w)};
#pragma unroll
      for (int y = 0; y < 4; ++y) d[WIDE_ADDITIONS ? x : y][WIDE_ADDITIONS ? y : x] = four[y] * p.scale;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 row = item.row() + half * 8 + g;
      const bool exists = LENGTHS_KIND == DENSE || row < sequence.rows();  // padding: zeros
      char* target = dQ + row * (p.dq_stride.seq * BYTES) + n * 8 * BYTES;
      u32 words[8];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float x = exists ? d[t][2 * half] : 0.0f, y = exists ? d[t][2 * half + 1] : 0.0f;
        pack_two<DqElement>(words, t, x, y);
      }
      if (row < sequence.stored_rows()) {
        store_16_bytes<ALIGNMENT>(target, {words[0], words[1], words[2], words[3]});
        if constexpr (BYTES == 4) store_16_bytes<ALIGNMENT>(target + 16, {words[4], words[5], words[6], words[7]});
      }
    }
  }
}
