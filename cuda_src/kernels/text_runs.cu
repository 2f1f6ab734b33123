// The runs of rows that hide each key where several texts lie one after another in a stream of tokens: what
// cufa/masks/streams.py computes on the host, from lengths that lie on the GPU and are not looked at.
//
// Each warp goes through the lengths of a sequence, 32 at a time, and adds them up, until it is behind its own 32 keys.
#include "primitives/primitives.cuh"

constexpr int TEXT_WARPS = 4;  // of a thread block; each has 32 keys of one sequence
constexpr i32 FROM_THE_START = i32(1u << 31), TO_THE_END = 0x7fffffff;

// Which rows do not see a key. CAUSAL: those behind its text. BOTH_WAYS: those before it, too. QUESTION: likewise, but the
// first text is seen to the end of the last.
enum TextForm { CAUSAL, BOTH_WAYS, QUESTION };

using Lengths = const i32*;  // (sequences, texts)
using Runs = i32*;           // (2 or 4, sequences, keys): lo, hi of each run

// Sums of the numbers of all lanes up to each.
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
  const i64 warps = (keys + 31) / 32, warp = i64(blockIdx.x) * TEXT_WARPS + threadIdx.x / 32;
  if (warp >= sequences * warps) return;
  const i64 sequence = warp / warps, first_key = warp % warps * 32, key = first_key + lane;
  i32 start = FROM_THE_START, end = FROM_THE_START;  // of the key's text; one past all of them has none
  i32 before = 0;                                    // tokens of the texts gone through
  bool of_first = false;
  for (i64 first = 0; first < texts && (form == QUESTION || before <= first_key + 31); first += 32) {
    const i32 length = first + lane < texts ? ld_global<i32>(lengths + sequence * texts + first + lane) : 0;
    const i32 ends = before + sums_to_here(length);
    // How many of these texts end before the key does: the next one is its own.
    int ended = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (i32(shfl(u32(ends), ended + step - 1)) <= key) ended += step;
    }
    const i32 own_end = i32(shfl(u32(ends), ended)), end_before = i32(shfl(u32(ends), max(ended - 1, 0)));
    if (before <= key && key < own_end) {
      start = ended == 0 ? before : end_before;
      end = own_end;
      of_first = first + ended == 0;
    }
    before = i32(shfl(u32(ends), 31));
  }
  if (key >= keys) return;
  if (end == FROM_THE_START) start = before;
  if (form == QUESTION && of_first) end = before;
  const i64 run = sequences * keys, place = sequence * keys + key;
  st_global(runs + place, end);
  st_global(runs + run + place, TO_THE_END);
  if (form == BOTH_WAYS) {
    st_global(runs + 2 * run + place, FROM_THE_START);
    st_global(runs + 3 * run + place, start);
  }
}
