// The runs of rows that hide each key if a stream of tokens has several texts. The lengths of the texts are on the GPU, and the
// host does not read them. cufa/masks/streams.py computes the same on the host.
//
// Each warp sums the lengths of a sequence, 32 at a time, until the sum passes its own keys.
#include "primitives/primitives.cuh"

constexpr int TEXT_WARPS = 4, WARP_KEYS = 256;  // warps of a thread block; keys of a warp
constexpr i32 FROM_THE_START = i32(1u << 31), TO_THE_END = 0x7fffffff;

// Which rows do not see a key. CAUSAL: rows after its text. BOTH_WAYS: rows before and after its text. QUESTION: as CAUSAL,
// but rows up to the end of the last text see the first text.
enum TextForm { CAUSAL, BOTH_WAYS, QUESTION };

using Lengths = const i32*;  // (sequences, texts)
using Runs = i32*;           // (2 or 4, sequences, keys): lo, hi of each run

// Inclusive prefix sums over the lanes of a warp.
DEVICE i32 sums_to_here(i32 x) {
  const int lane = lane_id();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const i32 before = i32(shfl(u32(x), lane >= distance ? lane - distance : lane));
    if (lane >= distance) x += before;
  }
  return x;
}

KERNEL __launch_bounds__(TEXT_WARPS * 32)
    text_runs(Lengths lengths, Runs runs, i64 sequences, i64 texts, i64 keys, i64 form) {
  const int lane = lane_id();
  const i64 warps = (keys + WARP_KEYS - 1) / WARP_KEYS, warp = i64(blockIdx.x) * TEXT_WARPS + threadIdx.x / 32;
  if (warp >= sequences * warps) return;
  const i64 sequence = warp / warps, first_key = warp % warps * WARP_KEYS, end_key = min(first_key + WARP_KEYS, keys);
  const Lengths of_sequence = lengths + sequence * texts;
  auto length_of = [&](i64 text) { return text < texts ? ld_global<i32>(of_sequence + text) : 0; };
  auto store = [&](i64 key, i32 start, i32 end) {
    const i64 run = sequences * keys, place = sequence * keys + key;
    st_global(runs + place, end);
    st_global(runs + run + place, TO_THE_END);
    if (form == BOTH_WAYS) {
      st_global(runs + 2 * run + place, FROM_THE_START);
      st_global(runs + 3 * run + place, start);
    }
  };
  i32 first_end = 0;  // end of the first text
  for (i64 first = 0; form == QUESTION && first < texts; first += 32) {
    first_end += i32(shfl(u32(sums_to_here(length_of(first + lane))), 31));
  }
  i32 before = 0;  // tokens of the texts summed so far
  for (i64 first = 0; first < texts && before < end_key; first += 32) {
    const i32 ends = before + sums_to_here(length_of(first + lane)), behind = i32(shfl(u32(ends), 31));
    for (i64 some = first_key; some < end_key && behind > first_key; some += 32) {
      const i64 key = some + lane;
      // Texts of these 32 that end at or before the key: the key belongs to the next text.
      int ended = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (i32(shfl(u32(ends), ended + step - 1)) <= key) ended += step;
      }
      const i32 end = i32(shfl(u32(ends), ended)), start = i32(shfl(u32(ends), max(ended - 1, 0)));
      if (before <= key && key < behind && key < end_key) {
        store(key, ended == 0 ? before : start, form == QUESTION && first + ended == 0 ? first_end : end);
      }
    }
    before = behind;
  }
  // Keys after all texts are hidden from every row.
  for (i64 key = max(first_key, i64(before)) + lane; key < end_key; key += 32) store(key, before, FROM_THE_START);
}
