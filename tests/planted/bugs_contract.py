"""Planted bugs that a contract of options notices: lengths, scores, masks, split keys (planted_runs.Bug)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from backends import EMULATE
from backward_support import near
from lengths_support import MAKE
from planted_runs import Bug
from support import make_inputs
from test_emulate_softcap import check_near_0_and_far
from test_irregular_masks import examples, execute, smallest
from test_ragged import check as check_ragged
from test_ragged import check_fa3
from test_splits import check as check_splits

from cufa import masks
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import Band, Mask
from cufa.run.emulate.calls import EmulationError, Execution

#: What is wrong, file, text, text instead, the call that shows it (a name in CALLS and its arguments), kernels.
ROWS: list[tuple[Any, ...]] = [
    # lengths, sinks and ALiBi
    ("diagonal of the longest", "shared/lengths.cuh", "(sequence.keys() - sequence.rows())",
        "(p.seqlen_k - p.seqlen_q)", ("ragged", "padded", "causal", "one query"), "fa2_forward"),
    ("diagonal of the arrays", "shared/lengths.cuh", "(sequence.keys() - sequence.rows())",
        "(p.seqlen_k - p.seqlen_q)", ("ragged", "packed", "causal", "one query"), "fa2_backward"),
    ("sink in the wrong base", "shared/alibi_sink.cuh", "(p.sink + head) * LOG2_E)", "(p.sink + head))",
        ("ragged", "packed", "causal, sink", "equal"), "fa2_forward"),
    ("sink does not join O", "shared/softmax.cuh", "return kept * inverse_sum(r);", "return inverse_sum(r) * 0.5f;",
        ("ragged", "padded", "causal, sink", "equal"), "fa2_forward"),
    ("sink of another head", "shared/alibi_sink.cuh", "load_sink(p.sink + head)",
        "load_sink(p.sink + head / 2)", ("ragged", "padded", "causal, sink", "equal"), "fa2_forward"),
    ("rows behind a sequence get the sink", "forward/fa2/store.cuh", "exists ? softmax.lse(r) : NEG_INF",
        "softmax.lse(r)", ("ragged", "padded", "causal, sink", "equal"), "fa2_forward"),
    ("keys behind a sequence are read", "forward/fa2/kernel.cu", "valid_keys = sequence.keys() - j * Bc",
        "valid_keys = Bc", ("ragged", "packed", "causal", "equal"), "fa2_forward"),
    ("queries behind a sequence are read", "backward/fa2/kernel.cu", "valid ? sequence.rows() - row : 0",
        "valid ? Br : 0", ("ragged", "padded", "full", "equal"), "fa2_backward"),
    ("another sequence's keys are seen", "shared/schedule.cuh", "return {sequence.rows(), sequence.keys(), edge",
        "return {sequence.rows(), p.total_k, edge", ("ragged", "packed", "full", "equal"), "fa2_forward"),
    ("padded rows keep their numbers", "forward/fa2/store.cuh",
        "exists ? Element::pack(o[0] * inverse, o[1] * inverse) : 0", "Element::pack(o[0] * inverse, o[1] * inverse)",
        ("ragged", "padded", "full", "empty ones"), "fa2_forward"),
    ("runs begin at the diagonal of the arrays", "shared/irregular_mask.cuh",
        "p.mask.run_shift_by_length * (band.keys - band.rows + p.seqlen_q)", "p.mask.run_shift_by_length * p.seqlen_q",
        ("ragged", "packed", "chunks, ALiBi", "one query"), "fa2_forward", "fa3_forward", "fa2_backward"),
    ("bits of padding are visible", "shared/bit_mask.cuh", "bits_between(0, 0, places - first)", "~0u",
        ("ragged", "padded", "bits", "equal"), "fa2_forward", "fa3_forward"),
    ("prefix of the first sequence", "shared/irregular_mask.cuh", "values + sequence * all", "values",
        ("ragged", "packed", "prefix, sink", "equal"), "fa3_forward"),
    ("slope not in units of log2", "shared/alibi_sink.cuh", "p.alibi_stride + head) * LOG2_E",
        "p.alibi_stride + head)", ("ragged", "packed", "top-left, ALiBi", "equal"), "fa2_forward"),
    ("slopes of the first sequence", "shared/alibi_sink.cuh", "i64(index) * p.alibi_stride",
        "i64(0) * p.alibi_stride", ("ragged", "packed", "top-left, ALiBi", "equal"), "fa2_backward"),
    ("distance without the diagonal", "shared/alibi_sink.cuh", "float(row + diagonal - key)", "float(row - key)",
        ("ragged", "packed", "all", "one query"), "fa2_forward"),
    ("dsink without its weight", "backward/common/passes.cuh",
        "ex2((load_sink(p.sink + item.head % p.heads) - lse) * LOG2_E) * delta", "delta",
        ("ragged", "packed", "causal, sink", "equal"), "fa2_backward"),
    ("dsink of the first strips", "backward/common/passes.cuh", "strip < workspace.strips; strip += 32",
        "strip < workspace.strips / 2; strip += 32", ("ragged", "packed", "causal, sink", "equal"), "fa2_backward"),
    ("strips of sequences overlap", "shared/packed_blocks.cuh", "u32(begin) / BLOCK + u32(sequence); }",
        "u32(begin) / BLOCK; }", ("ragged", "packed", "full", "equal"), "fa2_backward"),
    ("queries behind a sequence are not cleared", "backward/fa3_common/loader.cuh",
        "RAGGED ? at.block.rows() - at.block.q_tile(at.tile) * Br : Br", "Br", ("ragged", "padded", "full", "equal"),
        "fa3_backward", "fa3_backward_wide"),
    ("keys behind a sequence are not cleared", "backward/fa3_common/loader.cuh",
        "RAGGED ? at.block.keys() - at.block.first_key() - w * WARPGROUP_KEYS : WARPGROUP_KEYS", "WARPGROUP_KEYS",
        ("ragged", "packed", "causal", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("zeros behind a sequence without a fence", "backward/fa3_common/loader.cuh",
        "lane_id());\n      async_proxy_fence();", "lane_id());", ("ragged", "packed", "full", "equal"), "fa3_backward",
        "fa3_backward_wide"),
    ("tiles of sequences overlap", "backward/fa3_common/block.cuh",
        "first_packed_block<Br>(int(length.first_row()), found.batch)", "u32(length.first_row()) / Br",
        ("ragged", "packed", "full", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("the last tile's numbers are left out", "backward/common/passes.cuh",
        "valid && i64(found.block) * (BLOCK_STRIPS * STRIP) <", "valid && row() <",
        ("ragged", "packed", "full", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("gradients of another sequence's keys", "backward/fa3_common/gradients.cuh", "(block.key_in_arrays() + key)",
        "key", ("ragged", "packed", "full", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("rows of Q and keys of K behind a sequence are cleared by one thread", "backward/fa3_pair/kernel.cu",
        "RAGGED ? thread / 32 == 1 : thread == 32", "thread == 32", ("ragged", "packed", "full", "equal"),
        "fa3_backward_wide"),
    ("rows of dO and keys of V behind a sequence are cleared by one thread", "backward/fa3_pair/kernel.cu",
        "RAGGED ? thread / 32 == 2 : thread == 64", "thread == 64", ("ragged", "packed", "full", "equal"),
        "fa3_backward_wide"),
    # ALiBi and sinks in Hopper's backward
    ("distances of the other keys", "backward/fa3_common/narrow_consumer.cuh",
        "return consumer * WARPGROUP_KEYS + warp", "return warp",
        ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward"),
    ("distances of the wide kernel from the warp's first key", "backward/fa3_pair/kernel.cu",
        "return warp * 16 + lane / 4;", "return warp * 16;", ("ragged", "dense", "diagonal, negative slopes", "equal"),
        "fa3_backward_wide"),
    ("distances with keys and rows exchanged", "backward/fa3_common/gradients.cuh", "(t - r) * 8 + e",
        "(t + r) * 8 + e", ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward",
        "fa3_backward_wide"),
    ("distances from the tile's first row", "backward/fa3_common/gradients.cuh", "S.lane_column(lane) + alibi",
        "alibi", ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("distances without the diagonal", "backward/fa3_common/gradients.cuh", "lane) + alibi.diagonal - (",
        "lane) - (", ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("distances from the first key of all", "backward/fa3_common/gradients.cuh", "- (block.first_key() + key));",
        "- key);", ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("the slope of another head", "backward/fa3_common/gradients.cuh", "block.sequence(), tile.head)",
        "block.sequence(), 0)", ("ragged", "dense", "diagonal, negative slopes", "equal"), "fa3_backward",
        "fa3_backward_wide"),
    ("the slope of the first sequence", "backward/fa3_common/block.cuh", "DenseSequence<BackwardParams>{p, batch()}",
        "DenseSequence<BackwardParams>{p, 0}", ("ragged", "dense", "diagonal, negative slopes", "equal"),
        "fa3_backward", "fa3_backward_wide"),
    ("the slope of the first packed sequence", "backward/fa3_common/block.cuh", "RaggedSequence{batch(), ",
        "RaggedSequence{0, ", ("ragged", "packed", "top-left, ALiBi", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("ALiBi under the cap", "backward/fa3_common/gradients.cuh", "P * cap_slope(s) : P;",
        "P * cap_slope(P) : P;", ("ragged", "dense", "all", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("sums of the sink over the last tiles of dQ", "backward/common/workspace.cuh",
        "sinks = reinterpret_cast<float*>(items);", "sinks = reinterpret_cast<float*>(items) - 64;",
        ("ragged", "dense", "causal, sink", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("sums of the sink of the first tile alone", "backward/common/passes.cuh",
        "st_global(workspace.sinks + item.head * workspace.strips + item.strip, of_sink)",
        "st_global(workspace.sinks + item.head * workspace.strips + item.strip % TILE_STRIPS, of_sink)",
        ("ragged", "dense", "causal, sink", "equal"), "fa3_backward", "fa3_backward_wide"),
    ("the sink's sum of one row", "backward/common/passes.cuh", "    of_sink = warp_sum(of_sink);\n", "",
        ("ragged", "padded", "causal, sink", "equal"), "fa3_backward", "fa3_backward_wide"),
    # scores in FA3's forward
    ("the slope of the first sequence, in the forward", "shared/alibi_sink.cuh", "i64(index) * p.alibi_stride",
        "i64(0) * p.alibi_stride", ("fa3", "alibi", "causal", (300, 300)), "fa3_forward"),
    ("the slope of another head, in the forward", "forward/fa3/consumer_items.cuh", "descriptor), own_head);",
        "descriptor), 0);", ("fa3", "alibi of all sequences", "full", (300, 300)), "fa3_forward"),
    ("ALiBi after the scale", "forward/fa3/kernel.cu",
        "softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);\n    pack",
        "softmax_of_tile(S_rmem, softmax, p.scale_log2, alpha);\n    pack", ("fa3", "alibi", "full", (150, 300)),
        "fa3_forward"),
    ("a distance from the tile's first key", "forward/fa3/consumer_items.cuh",
        "p.scale_log2, row, tiles.j * Bc + lane % 4 * 2);\n", "p.scale_log2, row, tiles.j * Bc);\n",
        ("fa3", "alibi", "full", (150, 300)),
        "fa3_forward"),
    ("a sink forgotten", "shared/alibi_sink.cuh", "if constexpr (SINK) return softmax.join",
        "if constexpr (false) return softmax.join", ("fa3", "sink", "causal", (150, 300)), "fa3_forward"),
    ("the sink of another head", "forward/fa3/consumer.cuh", "row_factor(p, softmax, r, item.head)",
        "row_factor(p, softmax, r, 0)", ("fa3", "sink", "full", (150, 300)), "fa3_forward"),
    ("no sink where a block sees no key", "forward/fa3/consumer.cuh",
        "SINK ? load_sink(p.sink + item.head) : NEG_INF", "NEG_INF", ("fa3", "sink", "causal", (450, 150)),
        "fa3_forward"),
    ("the inverse of the wrong half", "forward/fa3/fast_softcap.cuh", "of_high = inverse * low;",
        "of_high = inverse * high;", ("fa3", "softcap", "full", (150, 300)), "fa3_forward"),
    ("a score for its neighbour", "forward/fa3/fast_softcap.cuh", "of_high * factor[3], of_high",
        "of_high * factor[2], of_high", ("fa3", "softcap", "full", (150, 300)), "fa3_forward"),
    ("far scores taken for near ones", "shared/softcap.cuh", "greatest * unit <= NEAR_0[TERMS]",
        "greatest * unit <= 4 * NEAR_0[TERMS]", ("fa3", "softcap", "full", (150, 300)), "fa3_forward"),
    ("a coefficient of the wrong sign", "shared/softcap.cuh", "-0.3329747653f", "0.3329747653f",
        ("fa3", "softcap near 0", "full", (150, 300)), "fa3_forward"),
    # FA3's soft cap by polynomials
    ("one lane near 0 speaks for its warp", "forward/fa3/kernel.cu", "!warp_any(!is_near_0<3>(greatest, unit))",
        "warp_any(is_near_0<3>(greatest, unit))", ("near 0", "full", 0.125), "fa3_forward"),
    ("one lane near 0 speaks for its warp, masked", "forward/fa3/fast_softcap.cuh",
        "warp_any(!is_near_0<4>(greatest_magnitude(S), unit))", "!warp_any(is_near_0<4>(greatest_magnitude(S), unit))",
        ("near 0", "causal", 0.125), "fa3_forward"),
    ("the longer polynomial beyond its limit", "forward/fa3/kernel.cu", "!warp_any(!is_near_0<4>(greatest, unit))",
        "true", ("near 0", "full", 0.125), "fa3_forward"),
    ("far scores taken for near ones, causal", "shared/softcap.cuh",
        "greatest * unit <= NEAR_0[TERMS] && unit > 1e-5f && unit < 1e4f", "true", ("near 0", "causal", 0.125),
        "fa3_forward"),
    ("far scores taken for near ones, window", "shared/softcap.cuh",
        "greatest * unit <= NEAR_0[TERMS] && unit > 1e-5f && unit < 1e4f", "true", ("near 0", "window", 0.125),
        "fa3_forward"),
    ("far scores below 0 taken for near ones", "shared/softcap.cuh", "c = fmaxf(c, fabsf(s));",
        "c = fmaxf(c, s);", ("near 0", "full", 0.125), "fa3_forward"),
    ("near scores by a wrong polynomial", "shared/softcap.cuh", "0.1252255531f", "0.3252255531f",
        ("near 0", "full", 0.125), "fa3_forward"),
    ("scores not so near by a wrong polynomial", "shared/softcap.cuh", "0.1314513541f", "0.1914513541f",
        ("near 0", "full", 0.125), "fa3_forward"),
    ("masked scores by a wrong polynomial, causal", "shared/softcap.cuh", "0.1314513541f", "0.3314513541f",
        ("near 0", "causal", 0.125), "fa3_forward"),
    ("a scale too small for its seventh power", "shared/softcap.cuh", "unit > 1e-5f && unit < 1e4f",
        "true", ("near 0", "full", 4.76837158203125e-07), "fa3_forward"),
    ("a scale too large for its seventh power", "shared/softcap.cuh", "unit > 1e-5f && unit < 1e4f",
        "true", ("near 0", "full", 16777216.0), "fa3_forward"),
    ("the maximum is not capped", "forward/fa3/fast_softcap.cuh", "m_tile[r] = cap(quad_max(m_tile[r]));",
        "m_tile[r] = quad_max(m_tile[r]);", ("near 0", "full", 0.0009765625), "fa3_forward"),
    ("the maximum of one lane", "forward/fa3/fast_softcap.cuh", "m_tile[r] = cap(quad_max(m_tile[r]));",
        "m_tile[r] = cap(m_tile[r]);", ("near 0", "full", 0.125), "fa3_forward"),
    # masks beyond bands
    ("the band's right edge misses a tile", "shared/irregular_mask.cuh", "some = left <= end - 1 + last,",
        "some = left < end - 1 + last,", ("mask", "edge"), "fa2_forward"),
    ("a tile that is hidden but for a row is skipped", "shared/irregular_mask.cuh", "end <= x.least_hi);",
        "end - 1 <= x.least_hi);", ("mask", "covered but for a row"), "fa2_forward"),
    ("a tile that is wholly hidden is visited", "shared/irregular_mask.cuh", "end <= x.least_hi);",
        "end < x.least_hi);", ("mask", "covered"), "fa2_forward"),
    ("a tile whose last row is hidden is called clear", "shared/irregular_mask.cuh", "end > x.least_lo);",
        "end - 1 > x.least_lo);", ("mask", "last row"), "fa2_forward"),
    ("a run ends a row late", "forward/irregular_scores.cuh", "if (past + 8 * r < length[e])",
        "if (past + 8 * r <= length[e])", ("mask", "two runs, of both"), "fa2_forward"),
    ("a run ends a row late, by keys", "backward/common/mask_by_keys.cuh", "- lo[run] >= length[run];",
        "- lo[run] > length[run];", ("mask", "two runs, of both"), "fa2_backward"),
    ("runs of another head", "shared/irregular_mask.cuh", "(mask.heads > 1 ? kv_head : 0)", "(0)",
        ("mask", "one run, of heads"), "fa2_forward"),
    ("runs of another sequence", "shared/irregular_mask.cuh", "(mask.sequences > 1 ? batch : 0)", "(0)",
        ("mask", "one run, of sequences, in a window"), "fa2_backward"),
    ("the extremes of the first run for both", "shared/irregular_mask.cuh",
        "workspace.extremes_of(first_run + run, block)", "workspace.extremes_of(first_run, block)",
        ("mask", "documents both ways"), "fa2_forward"),
    ("rows of runs are not shifted", "shared/irregular_mask.cuh", "i64(given_lo) - first_run_row(p)",
        "i64(given_lo)", ("mask", "shifted"), "fa2_forward"),
    ("upper ends of runs are not shifted", "shared/irregular_mask.cuh", "i64(given_hi) - first_run_row(p)",
        "i64(given_hi)", ("mask", "documents both ways"), "fa2_forward", "fa3_forward"),
    ("a tile that hides keys of its last rows is called clear", "shared/irregular_mask.cuh",
        ">= end - 1 + first || right <= keep)", ">= top + first || right <= keep)", ("mask", "global"),
        "fa2_forward", "fa3_forward"),
    ("kept keys after the right edge are called clear", "shared/irregular_mask.cuh",
        "every || right <= prefix ||", "every || right <= max(prefix, keep) ||", ("mask", "streaming"), "fa2_forward",
        "fa3_forward"),
    ("kept keys after the right edge are seen", "forward/irregular_scores.cuh", "min(mask.keep - key, end)",
        "mask.keep - key", ("mask", "streaming"), "fa2_forward", "fa3_forward"),
    ("empty runs count", "shared/irregular_mask.cuh", "if (given_lo < given_hi) {", "if (true) {",
        ("mask", "empty within a tile"), "fa2_forward"),
    ("the prefix of another sequence", "shared/irregular_mask.cuh", "values + sequence * all", "values",
        ("mask", "prefix of each"), "fa2_forward"),
    ("kept keys are forgotten", "forward/irregular_scores.cuh", "min(mask.keep - key, end)", "0",
        ("mask", "streaming"), "fa2_forward"),
    ("kept keys are forgotten, by keys", "backward/common/mask_by_keys.cuh", " || (Looked::SETS && j < mask.keep)",
        "", ("mask", "streaming"), "fa2_backward"),
    ("global rows see no more than others, by keys", "backward/common/mask_by_keys.cuh",
        " || (Looked::SETS && row < exempt)", "", ("mask", "global rows alone"), "fa2_backward"),
    ("tiles of global rows are skipped", "shared/irregular_mask.cuh", "some || left < prefix || top < exempt",
        "some || left < prefix", ("mask", "global rows alone"), "fa2_forward"),
    ("K of another tile is copied", "forward/fa2/kernel.cu",
        "K_stream.skip(walked.tile() - 1 - next.tile(), k_stride);", "", ("mask", "one run, of heads"), "fa2_forward"),
    ("dQ of another tile", "backward/fa2/kernel.cu", "add_dq(IRREGULAR ? before", "add_dq(IRREGULAR ? current",
        ("mask", "documents"), "fa2_backward"),
    ("Q by its place in the list", "backward/fa3_common/loader.cuh",
        "block.row_in_arrays() + at.block.q_tile(at.tile) * Br;", "block.row_in_arrays() + at.tile.q_tile * Br;",
        ("mask", "first rows"), "fa3_backward", "fa3_backward_wide"),
    ("gradients of queries by their place in the list", "backward/fa3_common/block.cuh", "+ u32(q_tile(tile));",
        "+ u32(tile.q_tile);", ("mask", "first rows"), "fa3_backward", "fa3_backward_wide"),
    ("the mask of a place in the list", "backward/fa3_common/gradients.cuh", "row = block.q_tile(tile) * Br",
        "row = tile.q_tile * Br", ("mask", "first rows but one"), "fa3_backward", "fa3_backward_wide"),
    ("a listed tile is clear whatever it is", "backward/fa3_common/block.cuh",
        "listed(tile.q_tile).masked() || extends_past_end()", "extends_past_end()", ("mask", "first rows but one"),
        "fa3_backward", "fa3_backward_wide"),
    ("the list of the key block before", "backward/fa3_common/block.cuh",
        "p, descriptor.k_block, descriptor.batch, descriptor.kv_head, tile);",
        "p, max(descriptor.k_block - 1, 0), descriptor.batch, descriptor.kv_head, tile);", ("mask", "first rows"),
        "fa3_backward", "fa3_backward_wide"),
    ("runs of rows are not reduced first", "backward/fa3_pair/kernel.cu", "  prepare_mask<MASK_KIND>(p,",
        "  prepare_mask<MASK_CAUSAL>(p,", ("mask", "first rows"), "fa3_backward_wide"),
    ("a list made by one thread", "backward/fa3_pair/kernel.cu", "IRREGULAR ? thread / 32 == 1 : thread == 32",
        "thread == 32", ("mask", "first rows"), "fa3_backward_wide"),
    # splits
    ("a split is lost", "forward/splits.cuh", "(count + each - 1) / each, vector",
        "(count + each - 1) / each - 1, vector", ("splits",), "fa3_forward"),
    ("a split takes its neighbour's first tile", "forward/splits.cuh",
        "part.first = min(tiles.first + split * each, tiles.end);",
        "part.first = min(tiles.first + split * each + (split > 0), tiles.end);", ("splits",), "fa3_forward"),
    ("the merge weighs in the wrong base", "shared/parts.cuh", "weight = ex2(m_part - m_new);",
        "weight = ex2((m_part - m_new) * 1.44269504f);", ("splits",), "fa3_forward"),
    ("the log-sum-exp is left in base 2", "shared/softmax.cuh", "NEG_INF : (m + lg2(l)) * LN_2;",
        "NEG_INF : m + lg2(l);", ("splits",), "fa3_forward"),
    ("a part's sum is one lane's", "forward/fa3/consumer_items.cuh", "      softmax.reduce_sum();\n      leave_part",
        "      leave_part", ("splits",), "fa3_forward"),
    ("the merge does not wait for the splits", "forward/fa3/kernel.cu", "    grid_await_previous();\n", "",
        ("splits",), "fa3_forward"),
    ("a mask starts at the row of another head", "forward/splits.cuh",
        "PACKED_HEADS == 1 ? row : row % HEAD_ROWS; }", "row; }", ("splits",), "fa3_forward"),
]  # fmt: skip


# --- Calls that show them ---------------------------------------------------------------------------------


def ragged(spec: Kernel, kind: str, options: str, lengths: str) -> None:
    of_dense = (80, 150) if spec.name.endswith("wide") else (150, 300)  # three tiles of rows or of keys
    case = MAKE[kind](of_dense if kind == "dense" else lengths, options, near(spec, 64), "float16")
    check_ragged(EMULATE, case, spec.operation, algorithm=spec.algorithm)


def fa3(spec: Kernel, options: str, mask: str, lengths: tuple[int, int]) -> None:
    check_fa3(options, mask, lengths, spec.configs[0])


def near_0(spec: Kernel, mask: str, scale: float) -> None:
    check_near_0_and_far(spec.configs[0], mask, "bfloat16", scale)


def irregular(spec: Kernel, mask: str) -> None:
    config = smallest(spec)
    if mask == "documents":  # dQ of another tile: two stages, and keys that warps share
        config = next(c for c in spec.configs if c.num_stages == 2 and c.shared_keys)
    how = {"config": config, "head_dim": max(64, config.min_head_dim), "execution": Execution()}
    execute(EMULATE, spec, shown(config)[mask], 200, 300, **how)


def shown(config: TileConfig) -> dict[str, Mask]:
    """Masks that show one bug each, for tiles of this size."""
    rows, keys = config.block_q, config.block_kv

    def one_tile(lo: int, hi: int) -> Columns:
        vectors = np.zeros((2, 1, 1, 300), np.int32)
        vectors[0, ..., keys : 2 * keys], vectors[1, ..., keys : 2 * keys] = lo, hi
        return Columns(Band(), Integers(vectors))

    return {
        **examples(200, 300),
        "covered": one_tile(rows, 2 * rows),
        "first rows": one_tile(0, rows),
        "first rows but one": one_tile(0, rows + 1),
        "covered but for a row": one_tile(rows, 2 * rows - 1),
        "last row": one_tile(2 * rows - 1, 2 * rows),
        "empty within a tile": one_tile(rows + 5, rows + 5),
        "edge": Band(None, 1, "top-left", prefix=1),
        "shifted": masks.chunks(100),
        "global rows alone": Band(0, 0, "top-left", global_tokens=3),
    }


def splits(spec: Kernel) -> None:
    config = next(c for c in spec.split_configs if c.packed_heads == 4 and c.fits(64))
    inputs = make_inputs(1, 4, 1, 16, 5 * config.block_kv, 64, spread=3.0)
    check_splits(EMULATE, spec, *inputs, num_splits=3, causal=True, config=config)


CALLS = {"ragged": ragged, "fa3": fa3, "near 0": near_0, "mask": irregular, "splits": splits}


def run(kernel: str, call: tuple[Any, ...]) -> str:
    """ "wrong": a wrong result, wrong tiles or a finding."""
    name, *arguments = call
    try:
        CALLS[name](KERNELS[kernel], *arguments)
    except (AssertionError, EmulationError):
        return "wrong"
    return ""


CONTRACTS: dict[str, list[Bug]] = {}
for _what, _file, _old, _new, _call, *_kernels in ROWS:
    for _kernel in _kernels:
        _bug = Bug(_what, _file, _old, _new, "wrong", partial(run, _kernel, _call))
        CONTRACTS.setdefault(f"contract of {_kernel}", []).append(_bug)
