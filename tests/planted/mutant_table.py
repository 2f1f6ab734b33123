"""The mutants of ``make mutants``: what is changed, why that is wrong, and the tests that serve the file.

Not here, as no result differs: another numbering of the slots of a balanced decode's parts, where none collide; a split
that is not cut at the end of its sequence before its keys are; ``slot <= count`` in decode/checks.py, which another
rule refuses; delta of rows that see nothing in cpu_backward.py, which is masked where it is not finite.
"""

# ruff: noqa: E501 - where it fits, a change is one line
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    before: str
    """Occurs once in the file."""
    after: str
    tests: str
    """Names of test files without ``test_`` and ``.py``, the likeliest to notice it first."""
    why: str
    """What is wrong with it."""


def file_of_tests(name: str) -> Path:
    """The test file of this name, in any folder. Mutants name no file in e2e, where names repeat those of other folders."""
    (path,) = (path for path in TESTS.glob(f"**/test_{name}.py") if path.parent.name != "e2e")
    return path


def _of(file: str, tests: str, *changes: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(file, before, after, tests, why) for before, after, why in changes]


CORE = [
    *_of(
        "cufa/problem/mask.py", "masks schedule",
        ("shift - self.left", "shift - self.left + 1", "a window one key too narrow on the left"),
        ("(key <= row + last)", "(key < row + last)", "the last key of each row is hidden"),
        ("np.maximum(row_first + first, 0)\n    high", "np.maximum(row_last + first, 0)\n    high",
         "tiles that only the first rows of a block see are skipped"),
        ("clear_end = (clear_high + 1) // block_columns", "clear_end = clear_high // block_columns",
         "a tile that is clear is masked"),
        ("(2 * smallest + growing - 1)", "(2 * smallest + growing + 1)", "scores are counted wrongly"),
        ("first + seqlen_q - 1 <= 0", "first + seqlen_q - 1 < 0", "a left edge that hides nothing takes a slower kernel"),
    ),
    *_of(
        "cufa/problem/mask_family.py", "masks schedule",
        ('"bottom-right": seqlen_k - seqlen_q', '"bottom-right": seqlen_q - seqlen_k', "the diagonal on the wrong side"),
    ),
    *_of(
        "cufa/schedule/schedule.py", "schedule",
        ("edge[edge == Tile.FULL] = Tile.PADDED", "pass", "tiles past the last query are called full"),
        ("self.mask.query_tiles if self.by_keys", "self.mask.query_tiles if not self.by_keys", "rows for columns"),
    ),
    *_of(
        "cufa/schedule/order.py", "schedule dashboard_launch backward",
        ("place, num_blocks - 1 - place", "place, place", "persistent blocks never turn around"),
        ("short = rows * 3 // 8", "short = rows // 2", "another order than the kernel's"),
        ("(free, (at + length, slot))", "(free, (at, slot))", "a slot is free before its block has ended"),
    ),
    *_of(
        "cufa/problem/scores.py", "masks backward reference_backward",
        ("return 1 - (capped", "return 1 + (capped", "the slope of a soft cap above 1"),
    ),
    *_of(
        "cufa/problem/options.py", "masks api",
        ("(bool, np.bool_, str, bytes)", "(str, bytes)", "softcap=True is taken as 1"),
        ("not math.isfinite(value) or value < 0", "value < 0", "a scale of inf is taken"),
    ),
    *_of(
        "cufa/kernels/params.py", "planner forward",
        ("max(scale * log2_e, SMALLEST_SCALE)", "scale * log2_e", "NaN from a mask and a scale of 0"),
        ("s // itemsize for s", "s * itemsize for s", "strides in bytes where elements are meant"),
    ),
    *_of(
        "cufa/problem/problem.py", "problem planner api decode_api decode_windows",
        ("return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)",
         "return 0 in (self.batch, self.heads, self.seqlen_q)", "no keys: a launch over nothing"),
        ("max(self.seqlen_k - first, self.cache.new_tokens)", "self.seqlen_k - first",
         "new tokens outside of the window are not stored"),
        ("keys * self.kv_heads * self.head_dim * (self.k_element", "keys * self.heads * self.head_dim * (self.k_element",
         "bytes of a cache counted per query head"),
    ),
    *_of(
        "cufa/gpu/occupancy.py", "occupancy",
        ("_round_up(registers * WARP_SIZE, arch.register_granularity)", "registers * WARP_SIZE", "registers are given out one by one"),
        ("shared_memory + arch.reserved_shared_memory,", "shared_memory,", "what the driver reserves is forgotten"),
    ),
]  # fmt: skip

PLANNING = [
    *_of(
        "cufa/plan/planner.py", "planner tuning",
        ("num_splits < 1", "num_splits < 0", "num_splits=0 is taken"),
        ("grid=(min(launch.grid[0], device.num_sms), 1, 1)", "grid=(device.num_sms, 1, 1)", "more blocks than items"),
        ("max(launch.grid[1:]) > _MAX_GRID_YZ", "max(launch.grid[1:]) >= _MAX_GRID_YZ", "the largest grid is refused"),
    ),
    *_of(
        "cufa/plan/dense.py", "planner tuning",
        ("tuned.config in fitting and", "", "tuned tiles that do not fit are taken"),
    ),
    *_of(
        "cufa/plan/candidates.py", "planner tuning",
        ("count.bit_length() - 1", "count.bit_length() - 2", "another length class than the records'"),
    ),
    *_of(
        "cufa/plan/candidates.py", "planner tuning",
        ("(spec for spec in preferred if refusal(spec, problem, device=device) is None)", "iter(preferred)", "no refusal counts"),
    ),
    *_of(
        "cufa/calls/tuning.py", "tuning",
        ("                AttributeError,\n", "", "a damaged file ends every call"),
        ("except (OSError, ValueError, RecursionError):", "except OSError:", "a file cut short ends every call"),
        ("isinstance(name, str) and name in known", "isinstance(name, str)", "a kernel that is gone is preferred"),
    ),
    *_of(
        "cufa/kernels/config.py", "shared_memory configs",
        ("end = max(end, offset + x.size)", "end = offset + x.size", "a small buffer over a large one cuts it short"),
        ("// 16 | 1) * 16", "// 16) * 16", "rows of a tile share their banks"),
    ),
    *_of(
        "cufa/build/covering.py", "covering variants",
        ("(code > 0) & (values[other] > 0)", "code > 0", "pairs with what a row lacks"),
        ("adds.argmax()", "(adds > 0).argmax()", "rows are taken that add little"),
    ),
    *_of(
        "cufa/build/variants.py", "variants",
        ('"SKIP_MASKED_TILES": variant.skips', '"SKIP_MASKED_TILES": True', "builds that differ are taken for one"),
        ("for alignment in (8, 4, 2):", "for alignment in (8, 4):", "2-byte copies are never compiled"),
    ),
]  # fmt: skip

CALLS = [
    *_of(
        "cufa/calls/arrays.py", "arrays api backward_api decode_errors decode_api",
        ("return start + sum(s for s in spans if s < 0),", "return start,", "reversed arrays: an overlap is missed"),
        ("extent = stride * (size - 1) + extent", "extent = stride * (size - 1)", "rows that share elements are written"),
        ("            if size > 1:\n                bits |= stride", "            if size > 0:\n                bits |= stride",
         "the stride of an axis of length 1 decides the kernel"),
        ("        stride > 0 for x in arrays", "        stride >= 0 for x in arrays", "broadcast axes pass for positive strides"),
    ),
    *_of(
        "cufa/problem/checks.py", "arrays api backward_api decode_errors decode_api",
        ("if isinstance(x, np.ma.MaskedArray):", "if False:", "a masked array's mask is ignored"),
    ),
    *_of(
        "cufa/calls/arrays.py", "arrays api backward_api decode_errors decode_api",
        ("not x.flags.writeable:\n        raise ValueError(f\"{name} is read-only: pass", "False:\n        raise ValueError(f\"{name} is read-only: pass",
         "a read-only out is found by NumPy, or written"),
    ),
    *_of(
        "cufa/calls/shapes.py", "arrays api backward_api decode_errors decode_api",
        ("or (kv_heads and heads % kv_heads)", "", "5 query heads share 2"),
    ),
    *_of(
        "cufa/schedule/decode.py", "decode_splits decode_cpu decode_merge decode_windows decode",
        ("return min(max(first * block_kv, begin), end), min(last * block_kv, end)",
         "return min(max(first * block_kv, begin), end), last * block_kv", "the last split reads past its sequence"),
        ("return share * self.total // self.used", "return share * (self.total // self.used)", "the last tiles belong to nobody"),
        ("keys = _keys(lengths[batch], first + inside,", "keys = _keys(lengths[batch], first,", "a piece in the midst begins with its item"),
        ("(reach + block_kv - 1) // block_kv)", "reach // block_kv)", "a window that begins within a tile has one more"),
    ),
    *_of(
        "cufa/calls/decode_checks.py", "decode_errors decode_api",
        ("// size, -(-length // size)", "// size, length // size", "a page filled in part is not checked"),
        ("if total <= capacity:", "if total < capacity:", "a full cache is refused"),
        ("(used >= problem.cache.num_pages)", "(used > problem.cache.num_pages)", "the first page that does not exist"),
        ("(other, its_entry) != (b, entry) and slot", "other != b and slot", "one sequence names a page twice"),
        ("if first <= entry < last:", "if entry < last:", "a page that the window has left is still in use"),
    ),
    *_of(
        "cufa/plan/decode_splits.py", "decode_splits planner",
        ("blocks if splits == 2 else blocks // 2", "blocks", "clusters that do not all run at once"),
        ("tiles, count, blocks = longest", "tiles, blocks, count = longest", "items and blocks are swapped"),
    ),
]  # fmt: skip

CPU = [
    *_of(
        "cufa/run/cpu/forward.py", "forward_cpu forward",
        ("shift = np.where(m_new == -np.inf, 0, m_new)", "shift = m_new", "NaN for rows that see nothing yet"),
        ("    np.copyto(O, 0, where=l == 0)\n", "", "NaN for rows that see nothing"),
        ("not self.is_masked(i, j) or np.isfinite(V).all()", "True", "0 · inf of a value that is not seen"),
        ("self.lse[..., rows] = (m + np.log(l))", "self.lse[..., rows] = (m - np.log(l))", "another LSE"),
        ("if self.is_masked(i, j):\n            hide", "if i == j:\n            hide", "masked tiles beside the diagonal"),
    ),
    *_of(
        "cufa/run/cpu/tiles.py", "forward_cpu backward_cpu forward",
        ("part = slice(columns[0], columns[-1] + 1)", "part = slice(columns[0], columns[-1])", "the last hidden column is seen"),
        ("!= TileClass.CLEAR)", "== TileClass.SKIP)", "tiles that the mask cuts are not masked"),
    ),
    *_of(
        "cufa/run/cpu/decode.py", "decode_cpu decode_api decode",
        ("count = min(size - slot, start", "count = min(size, start", "tokens appended past the end of a page"),
        ("tokens - 1 + first <= start", "first <= start", "later tokens see what lies before their window"),
        ("(last is None or stop - 1 <= last)", "(last is None or stop - 2 <= last)", "a token sees the one after it"),
        ("S.copy()), m, l  #", "S), m, l  #", "observers are told P for S"),
    ),
    *_of(
        "cufa/run/cpu/cache.py", "decode_cpu decode_api decode",
        ("if -largest <= wide.min(initial=0) and wide.max(initial=0) <= largest:", "if wide.max(initial=0) <= largest:",
         "-inf in a float16 cache is -65536"),
        ("if -largest <= wide.min(initial=0) and wide.max(initial=0) <= largest:", "if -largest <= wide.min(initial=0):",
         "inf in a float16 cache is 65536"),
    ),
    *_of(
        "dashboard/model/traffic_steps.py", "emulate_traffic dashboard_understand",
        ("was, ends = j > 0,", "was, ends = True,", "FA1 reads what nobody has written"),
        ("Move(\"S\", 3 * scores", "Move(\"S\", 2 * scores", "the naive softmax reads its scores twice"),
        ("if j == visited[0] else []", "", "FA2 loads Q with every tile"),
    ),
    *_of(
        "cufa/run/cpu/backward.py", "backward_cpu backward backward_api",
        ("delta[..., 0] -= dlse", "delta[..., 0] += dlse", "dlse with the wrong sign"),
        ("dK *= heads.scale", "dK *= 1", "dK is not scaled"),
        ("hidden is None or _finite(Q, dO, K, V, delta)", "hidden is None or _finite(Q, dO, K, delta)",
         "0 · inf of a value that is not seen"),
        ("range(share, schedule.num_kv_blocks, shares)", "range(share, schedule.num_kv_blocks - 1, shares)",
         "the last key block has no gradient"),
    ),
]  # fmt: skip

TOOLS = [
    *_of(
        "cufa/measure/measuring.py", "measuring",
        ("[:: -1 if rounds % 2 else 1]", "", "one contender is always first"),
    ),
    *_of(
        "cufa/measure/timing.py", "measuring",
        ("together = len(a) == len(b) and slow.regime is Regime.IN_TURNS", "together = False", "drift counts as noise"),
    ),
    *_of(
        "cufa/measure/check.py", "bench",
        ("worst = float(np.maximum(worst, error))", "worst = max(worst, error)", "NaN passes for no error"),
        ("x[table[batch, : -(-length // x.shape[2])], kv_head]", "x[table[batch, : length // x.shape[2]], kv_head]",
         "the last page of a sequence is not compared"),
    ),
    *_of(
        "cufa/measure/costs.py", "costs",
        ("of_block - groups.visited -", "of_block - schedule.visited * of_block -",
         "warpgroups that see nothing cost as much as others"),
        ('{"read": partial,', '{"read": whole,', "rows past the ends are read"),
    ),
    *_of(
        "cufa/run/emulate/memory.py", "emulate_memory emulate_findings",
        ("(gap if axis == 2 else 0)", "0", "no poison behind the last row"),
        ("    if not writable:\n        copy[...] = x\n", "    copy[...] = x\n", "an output that is never written shows its input"),
    ),
    *_of(
        "cufa/run/emulate/build.py", "emulate_builds emulate_runtime",
        ("if _is_sound(target):", "if target.exists():", "a damaged library is loaded"),
        ("            if time.time() - scratch.stat().st_mtime > _ABANDONED_SECONDS:\n    ", "            if True:\n    ",
         "the folder of a build that goes on is removed"),
    ),
]  # fmt: skip

FORWARD = [
    *_of(
        "cuda_src/shared/mask.cuh", "forward backward",
        ("return among_keys(i64(row) + first);", "return among_keys(i64(row) + first + 1);", "the left edge one key late"),
        ("return among_keys(i64(row) + 1 + last);", "return among_keys(i64(row) + last);", "the right edge one key early"),
        ("range.clear_end = keys_end(first_row) / BC;", "range.clear_end = keys_end(last_row) / BC;", "masked tiles called clear"),
        ("range.clear_first = (keys_begin(last_row) + BC - 1) / BC;", "range.clear_first = keys_begin(last_row) / BC;",
         "tiles at the left edge called clear"),
        ("if (KIND == MASK_BAND && begin >= end) range", "if (false) range", "a block that sees nothing visits tiles"),
    ),
    *_of(
        "cuda_src/shared/softmax.cuh", "forward emulate_planted",
        ("x = fmaxf(x, shfl_xor(x, 1));\n  return fmaxf(x, shfl_xor(x, 2));",
         "x = fmaxf(x, shfl_xor(x, 1));\n  return fmaxf(x, shfl_xor(x, 1));", "the maximum of half a row"),
        ("l[r] *= alpha[r];", "", "a row's sum is not brought to the new maximum"),
        ("return l[r] == 0.0f ? 0.0f : rcp(l[r]);", "return rcp(l[r]);", "NaN for rows that see nothing"),
        ("int SLACK = 8", "int SLACK = 24", "float16 probabilities overflow"),
    ),
    *_of(
        "cuda_src/mma/copy.cuh", "forward emulate_findings",
        ("!CHECK_ROWS || row + i * STEP < valid_rows);", "true);", "rows past the end are read"),
    ),
    *_of(
        "cuda_src/mma/copy_unit.cuh", "forward emulate_findings",
        ("return (units | 1) * 16;", "return units * 16;", "another pitch than the planner's"),
        ("for (int row = thread; row < ROWS; row += NUM_THREADS) {\n    st_shared_vec4",
         "for (int row = thread; row < ROWS - 1; row += NUM_THREADS) {\n    st_shared_vec4", "the padding of the last row"),
    ),
    *_of(
        "cuda_src/forward/fa3/persistent_items.cuh", "forward dashboard_launch",
        ("const u32 place = round % 2 == 0 ?", "const u32 place = true ?", "another order than is simulated"),
    ),
    *_of(
        "cuda_src/shared/schedule.cuh", "forward dashboard_launch",
        ("(i64(item.batch) * p.heads + item.head) * p.seqlen_q + row;\n}\n\n// One record",
         "(i64(item.batch) * p.kv_heads + item.head) * p.seqlen_q + row;\n}\n\n// One record", "the LSE of another head"),
    ),
    *_of(
        "cuda_src/shared/softcap.cuh", "forward backward",
        ("fabsf(x) < 0.5f ? fmaf(x * square, tail, x)", "fabsf(x) < 5.0f ? fmaf(x * square, tail, x)",
         "the series of tanh where it does not converge"),
    ),
    *_of(
        "cuda_src/shared/score.cuh", "forward backward",
        ("const VisibleColumns<KIND, SEGMENT> visible(mask, row + 8 * r,", "const VisibleColumns<KIND, SEGMENT> visible(mask, row,",
         "the mask of the row eight above"),
    ),
    *_of(
        "cuda_src/forward/fa2/kernel.cu", "forward",
        ("for (int r = 0; r < 2 * M_TILES; ++r) softmax.l[r] += l_other[r];", "", "the sum of half the keys"),
    ),
    *_of(
        "cuda_src/forward/fa2/store.cuh", "forward",
        ("lane % 4 == 0 && group_row + row < ended.stored_rows()", "lane % 4 == 0", "an LSE past the end"),
    ),
    *_of(
        "cuda_src/forward/fa1/kernel.cu", "forward",
        ("state.load(head, group, first_row, j == 0);", "state.load(head, group, first_row, true);", "what was summed is forgotten"),
        ("if (slice == 0) state.update_rows", "state.update_rows", "rows are updated once per slice"),
    ),
    *_of(
        "cuda_src/forward/fa3/consumer_items.cuh", "emulate_fa3 forward",
        ("for (int i = 0; i < HEAD_DIM / 2; ++i) O_rmem[i] = 0.0f;", "", "O of the item before"),
    ),
    *_of(
        "cuda_src/forward/fa3/kernel.cu", "emulate_fa3 forward",
        ("if (grown) {\n", "if (false) {\n", "O is not brought to the new maximum"),
    ),
    *_of(
        "cuda_src/forward/fa3/tiles.cuh", "emulate_fa3 forward",
        ("above = block.end - 1 - j;", "above = block.end - j;", "a consumer passes over a tile of its own"),
        ("return j >= tiles.clear_end;", "return false;", "the first tile of an item is not masked"),
    ),
]  # fmt: skip

DECODING = [
    *_of(
        "cuda_src/decode/sequence.cuh", "decode",
        ("return {old_keys, APPEND ? min(old_keys + p.new_tokens, p.capacity) : old_keys};",
         "return {old_keys, APPEND ? old_keys + p.new_tokens : old_keys};", "keys past the end of the cache"),
        ("return APPEND ? min(first, max(keys - p.new_tokens, 0)) : first;", "return first;", "new tokens that nobody sees are lost"),
        ("return min(max(entry, 0), p.num_pages - 1);", "return min(max(entry, 0), p.num_pages);", "a wild page is read"),
    ),
    *_of(
        "cuda_src/decode/schedule.cuh", "decode",
        ("span.last_tile = min(span.first_tile + each, end);", "span.last_tile = span.first_tile + each;",
         "the last split reads past its sequence"),
    ),
    *_of(
        "cuda_src/shared/parts.cuh", "decode",
        ("l = l * old_weight + u32_as_float(ml_part.y) * weight;", "l = l + u32_as_float(ml_part.y) * weight;",
         "sums of parts at different maxima"),
    ),
    *_of(
        "cuda_src/decode/merge.cuh", "decode",
        ("inverse *= ld_global<float>(p.v_scale + span.kv_head);", "inverse *= ld_global<float>(p.v_scale);",
         "every head has the scale of the first"),
        ("const int token = SEVERAL_TOKENS ? packed % p.tokens : 0;", "const int token = 0;", "all tokens in the place of one"),
    ),
    *_of(
        "cuda_src/decode/merge.cuh", "decode",
        ("float inverse = row_factor(p, whole, 0, head);", "float inverse = row_factor(p, whole, 0, span.kv_head);",
         "heads that share keys share a sink"),
        ("  float inverse = row_factor(p, whole, 0, head);\n  if (vector == 0 && p.lse != nullptr) {\n    "
         "st_global(p.lse + (i64(span.batch) * p.heads + head) * p.tokens + token, whole.lse(0));\n  }\n",
         "  if (vector == 0 && p.lse != nullptr) {\n    "
         "st_global(p.lse + (i64(span.batch) * p.heads + head) * p.tokens + token, whole.lse(0));\n  }\n"
         "  float inverse = row_factor(p, whole, 0, head);\n", "lse is without the sink"),
        ("if (vector == 0) st_global(slot + HEAD_DIM, sums.bits());",
         "if (SINK && vector == 0) sums.l += ex2(-sums.m);\n        "
         "if (vector == 0) st_global(slot + HEAD_DIM, sums.bits());",
         "something joins every part, not the row once"),
    ),
    *_of(
        "cuda_src/decode/tile.cuh", "decode",
        ("span.kv_head * p.group_size + head);", "span.kv_head * p.group_size);", "a group's rows have its first head's slope"),
        ("p.alibi_slopes + i64(span.batch) * p.alibi_stride +", "p.alibi_slopes +", "all sequences have the first one's slopes"),
        ("const int head = min(SEVERAL_TOKENS ? packed / p.tokens : packed, p.group_size - 1);",
         "const int head = min(packed, p.group_size - 1);", "tokens of one head have other heads' slopes"),
        ("const int packed = span.row_block * Br + first_row + r * 8 + lane / 4;",
         "const int packed = first_row + r * 8 + lane / 4;", "later blocks of rows have the first one's heads and tokens"),
        ("float(place[r] - key - scores.lane_column(lane))", "float(place[r] - key)", "distances from the lane's first column"),
        ("place[r] = span.length.keys - p.tokens + token;", "place[r] = span.length.old_keys - p.tokens + token;",
         "places are those before tokens were appended"),
    ),
    *_of(
        "cufa/plan/decode.py", "decode",
        ('"alibi_stride": stride_of_sequences(slopes),', '"alibi_stride": 0,', "all sequences have the first one\'s slopes"),
    ),
    *_of(
        "cuda_src/decode/sequence.cuh", "decode",
        ("return {0, all - (first - kept_tiles(p, keys))};", "return {0, all};", "tiles that nobody sees are counted"),
        ("return key < gap_start ? key : key + gap;", "return key + gap;", "kept keys are not those at the beginning"),
        ("(MASK == MASK_BAND || place + count > p.keep)", "MASK == MASK_BAND", "keys that nobody sees are not made zeros"),
    ),
    *_of(
        "cuda_src/decode/tile.cuh", "decode",
        ("max(min(p.keep, place[r] + 1), min(p.prefix, keys))", "max(p.keep, min(p.prefix, keys))",
         "a token sees kept keys after its own"),
        ("max(min(p.keep, place[r] + 1), min(p.prefix, keys))", "min(p.keep, place[r] + 1)", "a prefix is causal"),
    ),
    *_of(
        "cufa/problem/problem.py", "decode_windows decode",
        ("return Kept(window, self.first_keys[0])", "return Kept(window, 0)", "kept keys are not counted on the host"),
    ),
]  # fmt: skip

MUTANTS = [*CORE, *PLANNING, *CALLS, *CPU, *TOOLS, *FORWARD, *DECODING]
