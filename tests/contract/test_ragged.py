"""The contract of lengths, sinks and ALiBi, forward and backward: each padded or packed sequence is a call of its own,
what lies behind it is neither read nor kept, and a head's sink and slope are its own.

Results, log-sum-exps and gradients are within the bounds of lengths_support.Ragged of float64. What the words mean is
in test_lengths.py and test_head_scores.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS, backends
from backward_support import near
from lengths_support import (
    LENGTHS,
    MAKE,
    OF_WHOLE_ARRAYS,
    OPTIONS,
    SINK,
    SLOPES,
    dense,
    head_dim_near,
    packed,
    takes,
)
from support import assert_tiles

import cufa
from cufa import masks
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.lengths import Packed
from cufa.run.emulate.calls import EmulationError, Execution, run_plan

RAGGED = ("packed", "padded")
#: Those of e4m3: test_float8.py, test_float8_kernels.py.
FORWARD, BACKWARD = (
    [
        x
        for x in KERNELS.values()
        if x.operation == operation and "packed" in x.options and "float8_e4m3" not in x.dtypes
    ]
    for operation in ("forward", "backward")
)
#: Backward kernels with ALiBi and sinks of sequences as long as the arrays.
WHOLE = [x for x in KERNELS.values() if x.operation == "backward" and "alibi" in x.options]
CHANGING = [x for x in OPTIONS if {"alibi_slopes", "sink"} & OPTIONS[x].keys()]
BOTH = (False, True)
BANDS = [x for x in OPTIONS if "mask" not in OPTIONS[x] or not OPTIONS[x]["mask"].irregular_kind]


def check(backend, case, operation, **how):
    """One call, each of its results held to float64."""
    scores = {**case.lengths, **case.options, **how}
    if operation == "forward":
        done = backend.forward(*case.forward, **scores)
    else:
        done = backend.backward(*case.inputs, dlse=case.dlse, **scores)
    for name, x in done.results.items():
        case.check(name, x)
    return done


def served(backend, specs, *more, options=OPTIONS):
    """Kernels, each with the options that it takes, and with each of ``more``."""
    return [
        pytest.param(
            backend, spec, name, *rest, id="-".join(map(str, (backend, spec.name, name, *rest))),
            marks=MARKS[backend.name],
        )
        for spec in specs
        for name in options
        if takes(spec, name)
        for rest in itertools.product(*more)
    ]  # fmt: skip


# --- Results ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(on="gpu", fixed=24, dated=8, pairs=[("kind", "options")])
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@backends("gpu")
def test_calls_on_a_gpu(backend, kind, options, lengths, head_dim, dtype, deterministic):
    case = MAKE[kind](lengths, options, head_dim, dtype)
    for _ in range(2):  # the second call goes by the short cut
        check(backend, case, "forward")
        check(backend, case, "backward", deterministic=deterministic)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", RAGGED)
def test_calls_on_a_cpu(kind, options, lengths):
    case = MAKE[kind](lengths, options, 40, "float32")
    check(CPU, case, "forward")
    check(CPU, case, "backward")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OF_WHOLE_ARRAYS)
@pytest.mark.parametrize("kind", RAGGED)
def test_masks_of_whole_arrays_on_a_cpu(kind, options, lengths):
    test_calls_on_a_cpu(kind, options, lengths)


@pytest.mark.sampled(on="emulate", fixed=6, dated=1, pairs=[("kind", "options")])
@pytest.mark.sampled(on="gpu", fixed=40, dated=8, pairs=[("spec", "options"), ("kind", "options")])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize(
    ("backend", "spec", "options", "lengths", "element"),
    served(EMULATE, FORWARD, LENGTHS, (0, 1)) + served(GPU, FORWARD, ["all"], [1]),
)
def test_forward_of_each_kernel(backend, spec, kind, options, lengths, head_dim, element):
    for name in LENGTHS if lengths == "all" else [lengths]:
        case = MAKE[kind](name, options, head_dim, spec.dtypes[element % len(spec.dtypes)])
        check(backend, case, "forward", algorithm=spec.algorithm)


@pytest.mark.sampled(on="emulate", fixed=4, dated=1, pairs=[("kind", "options")])
@pytest.mark.sampled(
    on="gpu",
    fixed=40,
    dated=20,
    pairs=[("spec", "options"), ("spec", "head_dim"), ("kind", "options"), ("spec", "kind")],
)
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize(
    ("backend", "spec", "options", "lengths", "element"),
    served(EMULATE, BACKWARD, LENGTHS, (0, 1)) + served(GPU, BACKWARD, ["all"], [1]),
)
def test_gradients_of_each_kernel(backend, spec, kind, options, lengths, head_dim, element, deterministic):
    """Whichever "auto" takes."""
    head_dim = head_dim_near(spec, head_dim, options, deterministic)
    for name in LENGTHS if lengths == "all" else [lengths]:
        case = MAKE[kind](name, options, head_dim, spec.dtypes[element % len(spec.dtypes)])
        check(backend, case, "backward", algorithm=spec.algorithm, deterministic=deterministic)


@pytest.mark.sampled(on="emulate", fixed=6, dated=2)
@pytest.mark.sampled(on="gpu", fixed=16, dated=4, pairs=[("spec", "options")])
@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", [x for x in FORWARD if x.split_configs], ids=lambda s: s.name)
@backends("emulate", "gpu")
def test_split_keys_of_packed_sequences(backend, spec, options, lengths, head_dim, splits):
    case = packed(lengths, options, head_dim, "bfloat16")
    check(backend, case, "forward", algorithm=spec.algorithm, num_splits=splits)


@pytest.mark.sampled(on="emulate", fixed=12, dated=3, pairs=[("spec", "options"), ("kind", "options")])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OF_WHOLE_ARRAYS)
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("spec", [x for x in FORWARD + BACKWARD if "bits" in x.masks], ids=lambda s: s.name)
@backends("emulate", "gpu")
def test_masks_of_whole_arrays(backend, spec, kind, options, lengths):
    """Of a sequence, the first rows and keys of the mask."""
    case = MAKE[kind](lengths, options, near(spec, 64), spec.dtypes[0])
    for order in BOTH if spec.operation == "backward" else [False]:
        how = {"deterministic": True} if order else {}
        check(backend, case, spec.operation, algorithm=spec.algorithm, **how)


# --- Sequences as long as the arrays ----------------------------------------------------------------------


def tilings(spec: Kernel) -> list[TileConfig]:
    """Those of a Hopper GPU; of its own kernels also blocks that take several items."""
    if spec.uses_copy_engine:
        return [dataclasses.replace(x, persistent=p) for x in spec.configs for p in {False, x.persistent}]
    fitting = (fitting_configs(spec, head_dim_of(spec, x), EMULATE.device) for x in spec.configs)
    return [x for x, fits in zip(spec.configs, fitting, strict=True) if x in fits]


def head_dim_of(spec: Kernel, config: TileConfig, dtype: str = "bfloat16") -> int:
    """The least and the greatest but one."""
    return near(spec, max(config.min_head_dim, 40) if dtype == "float16" else config.max_head_dim - 8)


@pytest.mark.sampled(fixed=4, dated=1)
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150), (65, 129), (1, 64)])
@pytest.mark.parametrize("tiling", range(7))
@pytest.mark.parametrize(("backend", "spec", "options"), served(EMULATE, WHOLE, options=CHANGING))
def test_gradients_of_whole_arrays_in_every_tiling(
    backend, spec, options, tiling, lengths, dtype, deterministic
):
    """Of few tilings each stands for several."""
    plain = options in BANDS and {*OPTIONS[options]} <= {"mask", "alibi_slopes"} and not deterministic
    config = ([x for x in tilings(spec) if plain or not x.plain_only] * 7)[tiling]
    case = dense(lengths, options, head_dim_of(spec, config, dtype), dtype)
    how = {"config": config, "deterministic": deterministic, "algorithm": spec.algorithm}
    check(backend, case, "backward", **how)


@pytest.mark.sampled(fixed=16, dated=4, pairs=[("spec", "options")])
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("head_dim", [64, 40, 128, 192, 256])
@pytest.mark.parametrize(("backend", "spec", "options"), served(GPU, WHOLE, options=CHANGING))
def test_gradients_of_whole_arrays(backend, spec, options, head_dim, deterministic):
    head_dim = head_dim_near(spec, head_dim, options, deterministic)
    for lengths in ((150, 300), (300, 150), (65, 129), (1000, 700)):
        case = dense(lengths, options, head_dim, "bfloat16")
        check(backend, case, "backward", algorithm=spec.algorithm, deterministic=deterministic)


FA3 = KERNELS["fa3_forward"]
FA3_OPTIONS = {
    "alibi": {"alibi_slopes": SLOPES - 0.12},  # the first slope is below 0
    "alibi of all sequences": {"alibi_slopes": SLOPES[1]},
    "sink": {"sink": SINK},
    "softcap": {"softcap": 2.0},
    "softcap near 0": {"softcap": 30.0},
    "all": {"alibi_slopes": SLOPES, "sink": SINK, "softcap": 2.0},
}
FA3_MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "top-left": masks.causal("top-left"),
    "window": masks.window(60, 9),
}


def check_fa3(options, mask, lengths, config, dtype="bfloat16", schedule="ascending"):
    """On three persistent blocks, several items each."""
    case = dense(lengths, {"mask": FA3_MASKS[mask], **FA3_OPTIONS[options]}, config.max_head_dim, dtype)
    how = {"config": config, "blocks": 3, "execution": Execution("checked", schedule)}
    check(EMULATE, case, "forward", algorithm="fa3", **how)


@pytest.mark.emulate
@pytest.mark.sampled(fixed=4, dated=1, pairs=[("options", "mask")])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150), (65, 129)])
@pytest.mark.parametrize("mask", FA3_MASKS)
@pytest.mark.parametrize("options", FA3_OPTIONS)
@pytest.mark.parametrize("config", FA3.configs, ids=lambda c: f"{c.block_q}x{c.block_kv}-d{c.max_head_dim}")
def test_fa3_in_every_tiling(config, options, mask, lengths, dtype, schedule):
    check_fa3(options, mask, lengths, config, dtype, schedule)


# --- Tiles, and lengths that only the GPU knows -----------------------------------------------------------


@pytest.mark.emulate
@pytest.mark.parametrize("options", ["causal", "window, softcap", "streaming, all", "global tokens"])
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("spec", [FORWARD[0], *BACKWARD], ids=lambda s: s.name)
def test_tiles_are_those_of_each_sequence(spec, kind, options):
    """Each block visits, skips and masks as the schedule of its sequence says, and no block visits anything else."""
    case = MAKE[kind]("equal", options, near(spec, 64), "float16")
    how = {"algorithm": spec.algorithm, "trace": True, "execution": Execution()}
    done = check(EMULATE, case, spec.operation, **how)
    assert_tiles(done.plan, done.records)


@pytest.mark.emulate
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_lengths_are_read_by_the_kernel(operation):
    """A graph replays with other lengths: a plan that knows of none, and the same launches for any."""
    cases = [packed(lengths, "causal", 64, "float16") for lengths in ("equal", "one query")]
    room = [max(len(case.forward[i]) for case in cases) for i in (0, 1)]
    known = check(EMULATE, cases[0], operation, algorithm="fa2").plan
    unknown = dataclasses.replace(known.problem, lengths=Packed(*room), seqlen_q=room[0], seqlen_k=room[1])
    plan = make_plan(unknown, EMULATE.device, kernel=known.spec.name)
    results = ("out", "lse") if operation == "forward" else ("dq", "dk", "dv")
    for case in cases:
        names = ("dout", "q", "k", "v", "out", "lse", "dlse")
        inputs = dict(zip(names, (*case.inputs, case.dlse), strict=True))
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
        run = run_plan(plan, {**given, **case.lengths}, Execution("checked"))
        assert not run.findings, "\n".join(map(str, run.findings))
        for name in results:
            expected = case.expected[name]
            got = given[name][0] if name == "lse" else given[name][0].swapaxes(0, 1)
            case.check(name, got[..., : expected.shape[-1]] if name == "lse" else got[: len(expected)])


@pytest.mark.emulate
def test_a_kernel_ends_whatever_lengths_it_reads():
    """Nothing checks lengths on a GPU. Blocks of sequences that overlap write the same rows: no answer is right."""
    x, lse = np.ones((200, 2, 64), np.float16), np.ones((1, 2, 200), np.float32)
    honest = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 90, 200], np.int32))
    for operation, algorithm in itertools.product(("forward", "backward"), ("fa3", "fa2")):
        inputs = [x, x, x] if operation == "forward" else [x, x, x, x, x, lse[0]]
        order = {} if operation == "forward" else {"deterministic": True}
        plan = getattr(EMULATE, operation)(*inputs, causal=True, algorithm=algorithm, **order, **honest).plan
        for lie in ([150, 100, 200], [200, 7, 0], [-5, 2**31 - 1, -(2**31)], [150, 160, 200]):
            given = {
                y.name: x.reshape(1, 2, 200, 64).copy() if y.stride else lse.copy()
                for y in plan.operation.operands
            }
            run_plan(plan, given | dict.fromkeys(honest, np.array(lie, np.int32)), Execution("plain"))


@pytest.mark.emulate
def test_a_workspace_without_room_for_the_sums_of_a_sink_is_noticed():
    spec = KERNELS["fa3_backward"]
    case = dense((70, 130), "causal, sink", 64, "float16")
    config = spec.configs[0]
    plan = check(EMULATE, case, "backward", algorithm="fa3", config=config).plan
    strips = plan.problem.query_blocks(config.block_q) * config.block_q // 16 * plan.problem.heads
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    given = dict(zip(names, (*case.inputs, case.dlse), strict=True))
    results = {f"d{name}": np.full_like(given[name], np.nan) for name in "qkv"}
    given |= {**results, "sink": case.options["sink"], "dsink": np.full(4, np.nan, np.float32)}
    for missing in (0, 4, 4 * strips):
        short = dataclasses.replace(plan, workspace=plan.workspace - missing)
        try:
            found = run_plan(short, given, Execution("checked"), trace=False).findings
        except EmulationError:
            found = ("stopped",)
        assert bool(found) == bool(missing)


@backends("gpu")
def test_a_graph_replays_with_other_lengths(backend, cp):
    first, second = (
        packed(x, "causal", 64, "float16", tail=t) for x, t in (("equal", 0), ("whole tiles", 70))
    )
    forward = cufa.flash_attention_varlen
    rows, keys = (max(len(c.forward[i]) for c in (first, second)) for i in (0, 1))
    shapes = [(n, *x.shape[1:]) for x, n in zip(first.forward, (rows, keys, keys), strict=True)]
    q, k, v = (cp.empty(shape, np.float16) for shape in shapes)
    cu_q, cu_k = (cp.asarray(x) for x in first.lengths.values())
    out = backend.poisoned(q.shape, q.dtype)
    stream = cp.cuda.Stream(non_blocking=True)

    def fill(case):
        for x, y in zip((q, k, v), case.forward, strict=True):
            x.set(np.concatenate([y, np.full((len(x) - len(y), *y.shape[1:]), np.nan, y.dtype)]))
        cu_q.set(case.lengths["cu_seqlens_q"])
        cu_k.set(case.lengths["cu_seqlens_k"])

    fill(first)
    forward(q, k, v, cu_q, cu_k, causal=True, out=out)  # compiles
    with stream:
        stream.begin_capture()
        forward(q, k, v, cu_q, cu_k, causal=True, out=out)
        graph = stream.end_capture()
    for case in (second, first):
        fill(case)
        out.view(np.int16).fill(-1)
        cp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        case.check("out", out.get()[: len(case.expected["out"])])
        assert not out[len(case.expected["out"]) :].view(np.int16).any(), "zeros behind the last sequence"


# --- Calls on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RAGGED)
def test_lengths_and_sinks_on_the_host(kind, cp):
    """With arrays on the GPU, and with NumPy arrays alone."""
    case = MAKE[kind]("equal", "all", 64, "float16")
    dout, q, k, v, out, lse = case.inputs
    forward, backward = (
        (cufa.flash_attention_varlen, cufa.flash_attention_varlen_backward)
        if kind == "packed"
        else (cufa.flash_attention, cufa.flash_attention_backward)
    )
    for to, back in ((cp.asarray, cp.asnumpy), (np.asarray, np.asarray)):
        scores = {**case.lengths, **case.options}
        found = forward(*map(to, (q, k, v)), return_lse=True, **scores)
        gradients = backward(*map(to, (dout, q, k, v, out, lse)), dlse=to(case.dlse), **scores)
        for name, x in zip(case.expected, (*found, *gradients), strict=True):
            case.check(name, back(x))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [None, [9, 0]])
def test_a_sink_where_there_are_no_keys(seqlens, cp):
    q, k = cp.ones((2, 4, 9, 64), np.float16), cp.ones((2, 2, 0, 64), np.float16)
    sink, dlse = cp.array([0.5, -1, 2, -np.inf], np.float32), cp.ones((2, 4, 9), np.float32)
    lengths = {} if seqlens is None else {"seqlens_q": cp.array(seqlens, np.int32)}
    out, lse = cufa.flash_attention(q, k, k, sink=sink, return_lse=True, **lengths)
    given = {name: x.get() for name, x in lengths.items()}
    exact = cufa.attention_reference(q.get(), k.get(), k.get(), sink=sink.get(), return_lse=True, **given)
    np.testing.assert_array_equal(out.get(), exact[0])
    np.testing.assert_array_equal(lse.get(), exact[1])
    *_, dsink = cufa.flash_attention_backward(q, q, k, k, out, lse, dlse=dlse, sink=sink, **lengths)
    rows = 18 if seqlens is None else sum(seqlens)
    np.testing.assert_array_equal(dsink.get(), [rows, rows, rows, 0])


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("kind", MAKE)
@backends("gpu")
def test_dsink_is_the_same_in_every_run(backend, kind, head_dim):
    case = MAKE[kind]((300, 400) if kind == "dense" else "equal", "causal, sink", head_dim, "bfloat16")
    bits = {check(backend, case, "backward").results["dsink"].tobytes() for _ in range(20)}
    assert len(bits) == 1
