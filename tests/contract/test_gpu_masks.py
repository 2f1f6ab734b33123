"""Masks and numbers of heads that are on the GPU: made there, kept there, served by kernels or refused in words."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
from backward_gpu_support import check
from backward_support import make_case, near
from support import assert_attention, forward_operands, make_inputs
from test_emulate_masks_beyond import BACKWARD, SPECS, assert_tally, examples

import cufa
from cufa import masks
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, Band

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
MADE = [
    lambda to: masks.prefix(to(np.array([3, 40]))),
    lambda to: masks.streaming(to(np.array([2, 9])), 5),
    lambda to: masks.documents(to(np.array([10, 0, 40])), seqlen=50),
    lambda to: masks.documents(to(np.array([[10, 20, 20], [30, 5, 0]])), causal=False, seqlen=50),
    lambda to: masks.shared_question(5, to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.shared_question(to(np.array([5, 9])), to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.evict(to(np.arange(100).reshape(2, 50))),
    lambda to: masks.columns(to(np.arange(50)), to(np.arange(50) + 7), causal=True),
    lambda to: masks.from_flashmask(to(np.arange(2 * 3 * 50 * 4).reshape(2, 3, 50, 4) % 50), causal=False),
    lambda to: masks.from_flashmask(to(np.arange(2 * 50).reshape(2, 1, 50, 1)), causal=True),
]


@pytest.mark.parametrize("make", MADE)
def test_a_mask_made_on_the_gpu_is_the_one_made_on_the_host(make):
    there, here = make(lambda x: cupy.asarray(x.astype(np.int32))), make(lambda x: x.astype(np.int32))
    assert not there.known and there != here and "on a GPU" in str(there)
    assert there.on_host() == here and there.spread == here.spread
    with pytest.raises(ValueError, match=r"on a GPU.*mask\.on_host\(\)"):
        there.dense(50, 50)


def test_calls_on_the_gpu_say_what_they_do_not_serve():
    q, k, v = (cupy.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    mask = masks.evict(cupy.arange(50, dtype=cupy.int32))
    for options, word in (
        ({"mask": mask, "algorithm": "fa1"}, "band masks, not masks that hide each key"),
        ({"mask": masks.prefix(3), "algorithm": "fa1"}, "band masks, not masks with a prefix"),
        ({"sink": np.ones(4)}, "no sink"),
        ({"sink": cupy.ones(4, np.float32), "seqlens_k": cupy.ones(2, np.int32)}, "no sink"),
        ({"alibi_slopes": cupy.ones(4, np.float32)}, "no ALiBi"),
        ({"seqlens_k": cupy.ones(2, np.int32)}, "no padded sequences"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=word):
                cufa.flash_attention(q, k, v, **{"algorithm": "fa1", **options})
    packed = (x[0].swapaxes(0, 1) for x in (q, k, v))
    cu = cupy.array([0, 20, 50], np.int32)
    with pytest.raises(ValueError, match="no packed sequences"):
        cufa.flash_attention_varlen(*packed, cu, cu, algorithm="fa1")
    assert "at most" in str(cufa.plan((2, 4, 50, 64), mask=mask, device="cpu"))


def test_numbers_on_the_gpu_are_of_the_kernels_types():
    q, k, v = (cupy.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    for options, message in (
        ({"sink": cupy.ones(4)}, "sink is float64; on a GPU it must be float32"),
        ({"seqlens_k": cupy.ones(2, np.int64)}, "seqlens_k is int64; on a GPU it must be int32"),
    ):
        with pytest.raises(TypeError, match=message):
            cufa.flash_attention(q, k, v, **options)
    with pytest.raises(TypeError, match=r"rows is int64; on a GPU it must be int32"):
        masks.evict(cupy.arange(50))
    with pytest.raises(ValueError, match=r"lengths is on a GPU.*pass seqlen="):
        masks.documents(cupy.array([20, 30], np.int32))


def test_numpy_arrays_go_to_the_cpu_where_no_kernel_serves():
    """And not to the GPU that is there; asked for it, the call says why not."""
    q, k, v = make_inputs(2, 4, 2, 50, 50, 64, "float16")
    options = {"mask": masks.prefix(3), "sink": np.ones(4)}
    out = cufa.flash_attention(q, k, v, **options)
    np.testing.assert_array_equal(out, cufa.flash_attention(q, k, v, device="cpu", **options))
    with pytest.raises(ValueError, match="a sink with band masks only"):
        cufa.flash_attention(q, k, v, device="cuda", **options)
    with pytest.raises(ValueError, match=r"its numbers on a GPU.*mask\.on_host\(\)"):
        cufa.flash_attention(q, k, v, mask=masks.evict(cupy.arange(50, dtype=cupy.int32)), device="cpu")


# --- Masks beyond bands -----------------------------------------------------------------------------------

NAMES = tuple(examples(1, 1))
LENGTHS = ((200, 127), (65, 300), (450, 600), (1, 513), (513, 64))
KINDS = (("float16", None), ("bfloat16", None), ("float32", "float32"), ("float32", "tf32"))


def to_gpu(mask):
    """The same mask with its numbers on the GPU."""
    if isinstance(mask, Columns):
        return dataclasses.replace(mask, intervals=Integers(cupy.asarray(mask.intervals.values)))
    sets = (
        {name: getattr(mask, name) for name in ("prefix", "keep", "global_tokens")}
        if isinstance(mask, Band)
        else {}
    )
    there = {n: Integers(cupy.asarray(x.values)) for n, x in sets.items() if isinstance(x, Integers)}
    return dataclasses.replace(mask, **there)


@pytest.mark.sampled(fixed=16, dated=8)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_results(name, head_dim, dtype, precision):
    """Forward and backward, with numbers on the host and on the GPU."""
    for lengths in LENGTHS:
        mask = examples(*lengths)[name]
        case = make_case(2, 4, 2, *lengths, head_dim, dtype, mask=mask)
        q, k, v = (cupy.asarray(x) for x in (case.q, case.k, case.v))
        for given in (mask, to_gpu(mask)):
            out, lse = cufa.flash_attention(q, k, v, mask=given, precision=precision, return_lse=True)
            assert_attention(
                cupy.asnumpy(out), cupy.asnumpy(lse), case.q, case.k, case.v, mask=mask, precision=precision
            )
        check(cupy, case, precision=precision)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", BACKWARD, ids=lambda s: s.name)
def test_gradients_of_each_kernel(spec, name):
    """Whichever "auto" takes."""
    for head_dim in sorted({near(spec, x) for x in (64, 128, 256)}):
        for lengths in LENGTHS[:3]:
            case = make_case(2, 4, 2, *lengths, head_dim, spec.dtypes[-1], mask=examples(*lengths)[name])
            check(cupy, case, algorithm=spec.algorithm)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [*SPECS, *BACKWARD], ids=lambda s: s.name)
def test_tiles_are_those_of_the_schedule(spec, name):
    from cufa.run.cuda import backend as cuda

    lengths = 900, 1100
    case = make_case(2, 4, 2, *lengths, near(spec, 64), spec.dtypes[0], mask=examples(*lengths)[name])
    there = {n: cupy.asarray(getattr(case, n)) for n in ("dout", "q", "k", "v", "out", "lse")}
    plan_of = cufa.plan_backward if spec.operation == "backward" else cufa.plan
    shapes = [case.q.shape, case.k.shape, case.v.shape]
    plan = plan_of(*shapes, dtype=spec.dtypes[0], algorithm=spec.algorithm, device="cuda", **case.options)
    if spec.operation == "backward":
        given = {**there, "dlse": None, **{f"d{n}": cupy.empty_like(there[n]) for n in "qkv"}}
        given = {x.name: given[x.name] for x in plan.operation.operands}
    else:
        given = forward_operands(there["q"], there["k"], there["v"], cupy)
    if spec.name != "naive":
        assert_tally(types.SimpleNamespace(plan=plan, records=cuda.trace(plan, given)))


def test_numbers_on_the_host_are_uploaded_once(monkeypatch):
    from cufa.run.cuda import mask_uploads

    copies = []
    copy = mask_uploads._copy
    monkeypatch.setattr(mask_uploads, "_copy", lambda *args: copies.append(args) or copy(*args))
    mask = examples(64, 64)["evicted"]
    for length in (64, 64):
        for dtype in (cupy.float16, cupy.float32):
            q, k, v = (cupy.asarray(x, dtype) for x in make_inputs(2, 4, 2, length, 64, 64, "float32"))
            cufa.flash_attention(q, k, v, mask=mask)
    assert len(copies) == 1


def test_a_graph_replays_with_numbers_that_changed():
    """What is least and greatest in each block is found anew by every replay."""
    inputs = make_inputs(1, 2, 2, 300, 300, 64, "float16")
    q, k, v = (cupy.asarray(x) for x in inputs)
    rows = np.random.default_rng(0).integers(0, 300, (4, 300)).astype(np.int32)
    numbers = cupy.asarray(np.stack([rows[0], np.full(300, 2**31 - 1)]).astype(np.int32))[:, None, None]
    mask = Columns(CAUSAL, Integers(numbers))
    out = cupy.empty_like(q)
    cufa.flash_attention(q, k, v, mask=mask, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cufa.flash_attention(q, k, v, mask=mask, out=out)
        graph = stream.end_capture()
    for of_call in rows[1:]:
        numbers[0, 0, 0] = cupy.asarray(of_call)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_attention(cupy.asnumpy(out), None, *inputs, mask=masks.evict(of_call))


def test_streams_share_an_upload():
    """Calls of one mask on several streams, the first of which waits for other work."""
    inputs = make_inputs(2, 4, 2, 200, 256, 64, "float16")
    mask = examples(200, 256)["two runs, of both"]
    outs = []
    for _ in range(3):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            busy = cupy.ones((4000, 4000), cupy.float32)
            for _ in range(20):
                busy *= 1.0001
            outs.append(cufa.flash_attention(*(cupy.asarray(x) for x in inputs), mask=mask))
            stream.synchronize()
    for out in outs:
        assert_attention(cupy.asnumpy(out), None, *inputs, mask=mask)
