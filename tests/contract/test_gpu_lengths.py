"""Padded and packed lengths, sinks and ALiBi on a GPU: results, graphs that replay with other lengths, NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from backward_gpu_support import poisoned
from lengths_support import LENGTHS, OPTIONS, dense, head_dim_near, packed, padded, takes

import cufa
from cufa.kernels import KERNELS

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

MAKE = {"packed": packed, "padded": padded}
BACKWARD = [x for x in KERNELS.values() if x.operation == "backward" and "packed" in x.options]
CHANGING = [x for x in KERNELS.values() if x.operation == "backward" and "alibi" in x.options]
CALLS = {
    "packed": (cufa.flash_attention_varlen, cufa.flash_attention_varlen_backward),
    "padded": (cufa.flash_attention, cufa.flash_attention_backward),
    "dense": (cufa.flash_attention, cufa.flash_attention_backward),
}


def run(case, kind, to=cupy.asarray, **options):
    """Forward and backward: results by name."""
    forward, backward = CALLS[kind]
    dout, q, k, v, out, lse = map(to, case.inputs)
    given = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()}
    lengths = {name: to(x) for name, x in case.lengths.items()}
    found = forward(q, k, v, **lengths, return_lse=True, **given)
    gradients = backward(dout, q, k, v, out, lse, **lengths, dlse=to(case.dlse), **given, **options)
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    return dict(zip(names, (*found, *gradients), strict=False))


@pytest.mark.sampled(fixed=24, dated=8, pairs=[("kind", "options")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MAKE)
def test_results(kind, options, lengths, head_dim, dtype, deterministic):
    case = MAKE[kind](lengths, options, head_dim, dtype)
    for _ in range(2):  # the second call goes by the short cut
        for name, x in run(case, kind, deterministic=deterministic).items():
            case.check(name, cupy.asnumpy(x))


@pytest.mark.sampled(
    fixed=40,
    dated=20,
    pairs=[("spec", "options"), ("spec", "head_dim"), ("kind", "options"), ("spec", "kind")],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 256])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("spec", BACKWARD, ids=lambda s: s.name)
def test_gradients_of_each_kernel(spec, kind, options, head_dim, deterministic):
    """Whichever "auto" takes."""
    if not takes(spec, options):
        pytest.skip(f"{spec.name} does not take them")
    head_dim = head_dim_near(spec, head_dim, options, deterministic)
    for lengths in LENGTHS:
        case = MAKE[kind](lengths, options, head_dim, "bfloat16")
        assert_gradients_right(case, run(case, kind, deterministic=deterministic, algorithm=spec.algorithm))


@pytest.mark.sampled(fixed=16, dated=4, pairs=[("spec", "options")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 40, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [x for x, given in OPTIONS.items() if {"alibi_slopes", "sink"} & set(given)]
)
@pytest.mark.parametrize("spec", CHANGING, ids=lambda s: s.name)
def test_gradients_of_whole_arrays(spec, options, head_dim, deterministic):
    """Of each kernel, with sequences as long as the arrays."""
    if not takes(spec, options):
        pytest.skip(f"{spec.name} does not take them")
    head_dim = head_dim_near(spec, head_dim, options, deterministic)
    for lengths in ((150, 300), (300, 150), (65, 129), (1000, 700)):
        case = dense(*lengths, options, head_dim, "bfloat16")
        assert_gradients_right(
            case, run(case, "dense", deterministic=deterministic, algorithm=spec.algorithm)
        )


def assert_gradients_right(case, found):
    for name in {"dq", "dk", "dv", "dsink"} & case.expected.keys():
        case.check(name, cupy.asnumpy(found[name]))


@pytest.mark.parametrize("kind", MAKE)
def test_lengths_and_sinks_on_the_host(kind):
    case = MAKE[kind]("equal", "all", 64, "float16")
    host = {id(x) for x in (*case.lengths.values(), *case.options.values())}
    mixed = run(case, kind, to=lambda x: x if id(x) in host else cupy.asarray(x))
    numpy = run(case, kind, to=lambda x: x)
    for name, x in mixed.items():
        case.check(name, cupy.asnumpy(x))
        case.check(name, numpy[name])


def test_a_graph_replays_with_other_lengths():
    first, second = (
        packed(x, "causal", 64, "float16", tail=t) for x, t in (("equal", 0), ("whole tiles", 70))
    )
    forward = cufa.flash_attention_varlen
    rows, keys = (max(len(c.forward[i]) for c in (first, second)) for i in (0, 1))

    def longer(x, n):
        return np.concatenate([x, np.full((n - len(x), *x.shape[1:]), np.nan, x.dtype)])

    q, k, v = (
        cupy.empty((n, *x.shape[1:]), x.dtype) for x, n in zip(first.forward, (rows, keys, keys), strict=True)
    )
    cu_q, cu_k = (cupy.asarray(x) for x in first.lengths.values())
    out = poisoned(cupy, q)
    stream = cupy.cuda.Stream(non_blocking=True)

    def fill(case):
        for x, y in zip((q, k, v), case.forward, strict=True):
            x.set(longer(y, len(x)))
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
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        case.check("out", cupy.asnumpy(out)[: len(case.expected["out"])])
        assert not out[len(case.expected["out"]) :].view(np.int16).any(), "zeros behind the last sequence"


@pytest.mark.parametrize("seqlens", [None, [9, 0]])
def test_a_sink_where_there_are_no_keys(seqlens):
    q, k = cupy.ones((2, 4, 9, 64), np.float16), cupy.ones((2, 2, 0, 64), np.float16)
    sink, dlse = cupy.array([0.5, -1, 2, -np.inf], np.float32), cupy.ones((2, 4, 9), np.float32)
    lengths = {} if seqlens is None else {"seqlens_q": cupy.array(seqlens, np.int32)}
    out, lse = cufa.flash_attention(q, k, k, sink=sink, return_lse=True, **lengths)
    given = {name: x.get() for name, x in lengths.items()}
    exact = cufa.attention_reference(q.get(), k.get(), k.get(), sink=sink.get(), return_lse=True, **given)
    np.testing.assert_array_equal(out.get(), exact[0])
    np.testing.assert_array_equal(lse.get(), exact[1])
    *_, dsink = cufa.flash_attention_backward(q, q, k, k, out, lse, dlse=dlse, sink=sink, **lengths)
    rows = 18 if seqlens is None else sum(seqlens)
    np.testing.assert_array_equal(dsink.get(), [rows, rows, rows, 0])


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("kind", CALLS)
def test_dsink_is_the_same_in_every_run(kind, head_dim):
    make = {**MAKE, "dense": lambda _, *how: dense(300, 400, *how)}[kind]
    case = make("equal", "causal, sink", head_dim, "bfloat16")
    bits = {run(case, kind)["dsink"].get().tobytes() for _ in range(20)}
    assert len(bits) == 1
