"""Padded and packed lengths, sinks and ALiBi in the kernels that serve them, executed on a CPU in checked mode:
results, tiles against the schedule of each sequence, and bugs that must be noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_support import near
from lengths_support import LENGTHS, OPTIONS, head_dim_near, packed, padded, takes

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Packed
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate, emulate_backward, run_plan
from cufa.schedule.schedule import Schedule

FORWARD = [x for x in KERNELS.values() if x.operation == "forward" and "packed" in x.options]
BACKWARD = [x for x in KERNELS.values() if x.operation == "backward" and "packed" in x.options]
MAKE = {"packed": packed, "padded": padded}


def served(specs) -> list:
    """Kernels, each with the options that it takes."""
    return [
        pytest.param(spec, name, id=f"{spec.name}-{name}")
        for spec in specs
        for name in OPTIONS
        if takes(spec, name)
    ]


def forward(case, spec, mode="checked") -> Emulation:
    return emulate(*case.forward, **case.lengths, **case.options, algorithm=spec.algorithm, mode=mode)


def backward(case, spec, mode="checked", deterministic=False, config=None) -> Emulation:
    options = {**case.lengths, **case.options, "deterministic": deterministic, "config": config}
    return emulate_backward(*case.inputs, dlse=case.dlse, **options, algorithm=spec.algorithm, mode=mode)


def assert_right(case, result: Emulation) -> None:
    assert not result.findings, "\n".join(map(str, result.findings))
    for name, x in result.results.items():
        case.check(name, np.asarray(x))


@pytest.mark.sampled(fixed=4, dated=1, pairs=[("kind", "options")])
@pytest.mark.parametrize("element", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("spec", "options"), served(FORWARD))
def test_forward(spec, kind, options, lengths, head_dim, element):
    case = MAKE[kind](lengths, options, head_dim, spec.dtypes[element % len(spec.dtypes)])
    assert_right(case, forward(case, spec))


@pytest.mark.sampled(fixed=4, dated=1, pairs=[("kind", "options")])
@pytest.mark.parametrize("element", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("spec", "options"), served(BACKWARD))
def test_backward(spec, kind, options, lengths, deterministic, head_dim, element):
    head_dim = head_dim_near(spec, head_dim, options, deterministic)
    case = MAKE[kind](lengths, options, head_dim, spec.dtypes[element % len(spec.dtypes)])
    assert_right(case, backward(case, spec, deterministic=deterministic))


@pytest.mark.parametrize("options", ["causal", "window, softcap"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("spec", [FORWARD[0], *BACKWARD], ids=lambda s: s.name)
def test_tiles_are_those_of_each_sequence(spec, kind, options):
    """Each block visits, skips and masks as the schedule of its sequence says, and no block visits anything else."""
    case = MAKE[kind]("equal", options, near(spec, 64), "float16")
    run = backward if spec in BACKWARD else forward
    result = run(case, spec, mode="plain")
    config, found = result.plan.config, {}
    for record in result.records:
        key = record["batch"], record["head"], record["q_block"]
        assert key not in found
        found[key] = (
            record["first_tile"],
            record["tiles_visited"],
            record["first_clear"],
            record["tiles_clear"],
        )
    expected = {}
    for part in result.plan.problem.parts:
        schedule = Schedule.of(part.problem, config.block_q, config.block_kv, spec.skip_masked_tiles)
        tiles = schedule.ranges
        for block in range(schedule.num_blocks):
            first, end = int(tiles.first[block]), int(tiles.end[block])
            clear = int(tiles.clear_first[block]), int(tiles.clear_end[block])
            for head in range(part.problem.kv_heads if run is backward else part.problem.heads):
                expected[part.sequence, head, block] = first, end - first, clear[0], clear[1] - clear[0]
    visited = {key: (x[0], x[1]) if x[1] else (0, 0) for key, x in expected.items()}
    assert {key: (x[0], x[1]) if x[1] else (0, 0) for key, x in found.items()} == visited


# --- Bugs that must be noticed ----------------------------------------------------------------------------

PACKED_BLOCKS = "shared/packed_blocks.cuh"
LENGTHS_CUH, SCHEDULE, SCORE, SOFTMAX = (
    f"shared/{x}.cuh" for x in ("lengths", "schedule", "alibi_sink", "softmax")
)
F, B, PASSES = "forward/fa2/kernel.cu", "backward/fa2/kernel.cu", "backward/common/passes.cuh"
STORE = "forward/fa2/store.cuh"
HOPPER, LOADER, WIDE = (
    "backward/fa3_common/block.cuh",
    "backward/fa3_common/loader.cuh",
    "backward/fa3_pair/kernel.cu",
)
HOPPERS = "fa3_backward", "fa3_backward_wide"

#: (call, kind, options, lengths, file, what is there, what is planted, kernels if not FA2's), by what is wrong.
BUGS = {
    "diagonal of the longest": (
        forward,
        "padded",
        "causal",
        "one query",
        LENGTHS_CUH,
        "(sequence.keys() - sequence.rows())",
        "(p.seqlen_k - p.seqlen_q)",
    ),
    "diagonal of the arrays": (
        backward,
        "packed",
        "causal",
        "one query",
        LENGTHS_CUH,
        "(sequence.keys() - sequence.rows())",
        "(p.seqlen_k - p.seqlen_q)",
    ),
    "sink in the wrong base": (
        forward,
        "packed",
        "causal, sink",
        "equal",
        SCORE,
        "(p.sink + head) * LOG2_E)",
        "(p.sink + head))",
    ),
    "sink does not join O": (
        forward,
        "padded",
        "causal, sink",
        "equal",
        SOFTMAX,
        "return kept * inverse_sum(r);",
        "return inverse_sum(r) * 0.5f;",
    ),
    "sink of another head": (
        forward,
        "padded",
        "causal, sink",
        "equal",
        SCORE,
        "ld_global<float>(p.sink + head)",
        "ld_global<float>(p.sink + head / 2)",
    ),
    "rows behind a sequence get the sink": (
        forward,
        "padded",
        "causal, sink",
        "equal",
        STORE,
        "exists ? softmax.lse(r) : NEG_INF",
        "softmax.lse(r)",
    ),
    "keys behind a sequence are read": (
        forward,
        "packed",
        "causal",
        "equal",
        F,
        "valid_keys = sequence.keys() - j * Bc",
        "valid_keys = Bc",
    ),
    "queries behind a sequence are read": (
        backward,
        "padded",
        "full",
        "equal",
        B,
        "valid ? sequence.rows() - row : 0",
        "valid ? Br : 0",
    ),
    "another sequence's keys are seen": (
        forward,
        "packed",
        "full",
        "equal",
        SCHEDULE,
        "return {sequence.rows(), sequence.keys(), edge",
        "return {sequence.rows(), p.total_k, edge",
    ),
    "padded rows keep their numbers": (
        forward,
        "padded",
        "full",
        "empty ones",
        STORE,
        "exists ? Element::pack(o[0] * inverse, o[1] * inverse) : 0",
        "Element::pack(o[0] * inverse, o[1] * inverse)",
    ),
    "slope not in units of log2": (
        forward,
        "packed",
        "top-left, ALiBi",
        "equal",
        SCORE,
        "p.alibi_stride + head) * LOG2_E",
        "p.alibi_stride + head)",
    ),
    "slopes of the first sequence": (
        backward,
        "packed",
        "top-left, ALiBi",
        "equal",
        SCORE,
        "i64(number) * p.alibi_stride",
        "i64(0) * p.alibi_stride",
    ),
    "distance without the diagonal": (
        forward,
        "packed",
        "all",
        "one query",
        SCORE,
        "float(row + diagonal - key)",
        "float(row - key)",
    ),
    "dsink without its weight": (
        backward,
        "packed",
        "causal, sink",
        "equal",
        PASSES,
        "ex2((ld_global<float>(p.sink + item.head % p.heads) - lse) * LOG2_E) * delta",
        "delta",
    ),
    "dsink of the first strips": (
        backward,
        "packed",
        "causal, sink",
        "equal",
        PASSES,
        "strip < workspace.strips; strip += 32",
        "strip < workspace.strips / 2; strip += 32",
    ),
    "strips of sequences overlap": (
        backward,
        "packed",
        "full",
        "equal",
        PACKED_BLOCKS,
        "u32(begin) / BLOCK + u32(sequence); }",
        "u32(begin) / BLOCK; }",
    ),
    "queries behind a sequence are not cleared": (
        backward, "padded", "full", "equal", LOADER,
        "RAGGED ? at.block.rows() - at.block.q_tile(at.tile) * Br : Br", "Br", *HOPPERS,
    ),
    "keys behind a sequence are not cleared": (
        backward, "packed", "causal", "equal", LOADER,
        "RAGGED ? at.block.keys() - at.block.first_key() - w * GROUP_KEYS : GROUP_KEYS", "GROUP_KEYS", *HOPPERS,
    ),
    "zeros behind a sequence without a fence": (
        backward, "packed", "full", "equal", LOADER,
        "lane_id());\n      async_proxy_fence();", "lane_id());", *HOPPERS,
    ),
    "tiles of sequences overlap": (
        backward, "packed", "full", "equal", HOPPER,
        "first_packed_block<Br>(int(length.first_row()), found.batch)", "u32(length.first_row()) / Br",
        *HOPPERS,
    ),
    "the last tile's numbers are left out": (
        backward, "packed", "full", "equal", PASSES,
        "valid && i64(found.block) * (BLOCK_STRIPS * STRIP) <", "valid && row() <", *HOPPERS,
    ),
    "gradients of another sequence's keys": (
        backward, "packed", "full", "equal", "backward/fa3_common/gradients.cuh",
        "(block.key_in_arrays() + key)", "key", *HOPPERS,
    ),
    "rows of Q and keys of K behind a sequence are cleared by one thread": (
        backward, "packed", "full", "equal", WIDE,
        "RAGGED ? thread / 32 == 1 : thread == 32", "thread == 32", "fa3_backward_wide",
    ),
    "rows of dO and keys of V behind a sequence are cleared by one thread": (
        backward, "packed", "full", "equal", WIDE,
        "RAGGED ? thread / 32 == 2 : thread == 64", "thread == 64", "fa3_backward_wide",
    ),
}  # fmt: skip


def kernels_with(bug: str) -> list[str]:
    run, *_ = BUGS[bug]
    return list(BUGS[bug][7:]) or ["fa2_forward" if run is forward else "fa2_backward"]


@pytest.mark.parametrize(("kernel", "bug"), [(x, bug) for bug in BUGS for x in kernels_with(bug)])
def test_planted_bugs_are_noticed(kernel, bug, plant):
    run, kind, options, lengths, file, right, wrong, *_ = BUGS[bug]
    spec = KERNELS[kernel]
    case = MAKE[kind](lengths, options, near(spec, 64), "float16")
    assert_right(case, run(case, spec))
    plant(file, right, wrong)
    with pytest.raises((AssertionError, EmulationError)):  # a wrong result, or a finding
        assert_right(case, run(case, spec))


@pytest.mark.parametrize("run", [forward, backward])
def test_lengths_are_read_by_the_kernel(run):
    """A graph replays with other lengths: a plan that knows of none, and the same launches for any."""
    cases = [packed(lengths, "causal", 64, "float16") for lengths in ("equal", "one query")]
    room = [max(len(case.forward[i]) for case in cases) for i in (0, 1)]
    known = run(cases[0], (FORWARD if run is forward else BACKWARD)[0], mode="plain").plan
    unknown = dataclasses.replace(known.problem, lengths=Packed(*room), seqlen_q=room[0], seqlen_k=room[1])
    plan = make_plan(unknown, Device.typical("sm_90"), kernel=known.spec.name)
    for case in cases:
        names = ("dout", "q", "k", "v", "out", "lse", "dlse")
        inputs = dict(zip(names, (*case.inputs, case.dlse), strict=True))
        results = ("out", "lse") if run is forward else ("dq", "dk", "dv")
        given = {x.name: None for x in plan.operation.operands}
        for name, x in inputs.items():
            rows = room[name in ("k", "v")]
            x = x.swapaxes(0, 1) if name in ("lse", "dlse") else x
            longer = np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), np.nan, x.dtype)])
            if name in given:
                given[name] = np.ascontiguousarray(longer.swapaxes(0, 1))[None]
        for name in results:
            like = {"out": "q", "lse": "lse"}.get(name, name[1:])
            given[name] = np.full_like(given[like], np.nan)
        result = run_plan(plan, {**given, **case.lengths}, Execution("checked"))
        assert not result.findings, "\n".join(map(str, result.findings))
        for name in results:
            expected = case.expected[name]
            got = given[name][0] if name == "lse" else given[name][0].swapaxes(0, 1)
            got = got[..., : expected.shape[-1]] if name == "lse" else got[: len(expected)]
            case.check(name, got)
