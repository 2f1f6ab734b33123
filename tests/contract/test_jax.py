"""``cufa.jax``: values and gradients against float64, under ``jit`` and ``vmap``, on the CPU and on a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from backward_support import Case, assert_gradients
from support import assert_attention, make_inputs

import cufa

jax = pytest.importorskip("jax", reason="needs JAX")
from cufa.jax import attention  # noqa: E402
from cufa.problem.typing import OperatorOptions  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (7, 0)},
    {"mask": cufa.masks.documents([30, 40])},
    {"softcap": 5.0, "scale": 0.3},
]


def on(device: str, *arrays: np.ndarray) -> list[Any]:
    return [jax.device_put(x, jax.devices(device)[0]) for x in arrays]


def inputs(dtype: str) -> tuple[np.ndarray, ...]:
    """dout, q, k, v."""
    q, k, v = make_inputs(2, 4, 2, 70, 70, 32, dtype)
    return make_inputs(2, 4, 2, 70, 70, 32, dtype, seed=1)[0], q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_values_and_gradients(compiled, options, dtype, device):
    arrays = inputs(dtype)

    def call(dout: Any, *qkv: Any) -> Any:
        out, pull_back = jax.vjp(lambda *x: attention(*x, layout="bhsd", **options), *qkv)
        return out, *pull_back(dout)

    out, *gradients = map(np.asarray, (jax.jit(call) if compiled else call)(*on(device, *arrays)))
    assert_attention(out, None, *arrays[1:], **options)
    exact, lse = cufa.attention_reference(*arrays[1:], return_lse=True, **options)
    case = Case(*arrays, exact.astype(out.dtype), lse.astype(np.float32), None, options)
    assert_gradients(gradients, case)


@pytest.mark.parametrize("device", DEVICES)
def test_the_layout_is_jaxs_and_the_values_are_its_own(device):
    r = np.random.default_rng(0)
    q, k = (r.standard_normal((2, 33, heads, 16), np.float32) for heads in (4, 2))
    q, k = on(device, q, k)
    expected = jax.nn.dot_product_attention(q, k, k, is_causal=True)
    np.testing.assert_allclose(
        attention(q, k, k, causal=True), expected, atol=5e-3 if device == "cuda" else 2e-6
    )


@pytest.mark.parametrize("device", DEVICES)
def test_mapped_over_an_axis(device):
    q, k, v = on(device, *inputs("float32")[1:])
    mapped = jax.vmap(lambda q: attention(q, k, v, layout="bhsd"))(jax.numpy.stack([q, 2 * q]))
    for got, factor in zip(mapped, (1, 2), strict=True):
        np.testing.assert_array_equal(got, attention(factor * q, k, v, layout="bhsd"))


@pytest.mark.parametrize("device", DEVICES)
def test_sink_lse_and_lengths_under_jit(device):
    q, k, v, lengths = on(device, *inputs("bfloat16")[1:], np.array([70, 9], np.int32))
    (sink,) = on(device, np.linspace(-1, 1, 4, dtype=np.float32))

    def total(sink: Any) -> Any:
        options = {"sink": sink, "seqlens_k": lengths, "layout": "bhsd", "return_lse": True}
        return attention(q, k, v, **options)[1].sum()

    # lse = log(sum of exp(scores) + exp(sink)), so that its gradient is the share of the sink.
    _, lse = attention(q, k, v, sink=sink, seqlens_k=lengths, layout="bhsd", return_lse=True)
    share = np.exp(np.asarray(sink)[None, :, None] - np.asarray(lse)).sum((0, 2))
    np.testing.assert_allclose(jax.jit(jax.grad(total))(sink), share, rtol=1e-3)


def test_the_array_api_takes_bfloat16():
    (q,) = on("cpu", inputs("bfloat16")[1])
    assert cufa.flash_attention(q, q, q, device="cpu").dtype == q.dtype


def relative(s, b, h, i, j, table, shift):
    return s + table[h, np.clip(j - i, -3, 3) + 3 + shift[0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_gradients_of_arrays_of_a_score_function_of_a_bias_and_of_a_sink(compiled, device):
    """A call returns gradients of the named arrays; an array of integers has none."""
    dout, q, k, v = inputs("float32" if device == "cpu" else "bfloat16")
    r = np.random.default_rng(2)
    table, bias, sink = (r.standard_normal(n, np.float32) for n in ((4, 7), (1, 4, 1, 70), (4,)))
    arrays, near = on(device, q, k, v, table, bias, sink), 1e-4 if device == "cpu" else 5e-2
    shift = np.array([0], np.int8)

    def of_table(q, k, v, table, bias, sink):
        read = {"table": table, "shift": shift}
        return attention(q, k, v, layout="bhsd", causal=True, score=relative, arrays=read, sink=sink)

    def of_bias(q, k, v, table, bias, sink):
        return attention(q, k, v, layout="bhsd", causal=True, bias=bias, sink=sink)

    host = {"score": cufa.score(relative, table=table, shift=shift)}
    for call, options, name, place in ((of_table, host, "table", 3), (of_bias, {"bias": bias}, "bias", 4)):
        loss = lambda *x, call=call: (call(*x) * dout).sum()  # noqa: E731
        made = jax.grad(loss, argnums=(0, place, 5))
        options |= {"causal": True, "sink": sink}
        dq, _, _, dsink, exact = cufa.attention_reference_backward(
            dout, q, k, v, **options, gradients=(name,)
        )
        for x, y in zip((jax.jit(made) if compiled else made)(*arrays), (dq, exact, dsink), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=near * np.abs(y).max())
        np.testing.assert_allclose(jax.grad(loss)(*arrays), dq, atol=near * np.abs(dq).max())


def test_scores_that_are_refused():
    q = inputs("float32")[1]
    for options, error, words in (
        (
            {"score": cufa.score(lambda s, b, h, i, j: s)},
            TypeError,
            "score is Score: pass the function itself",
        ),
        ({"arrays": {}}, ValueError, "arrays= is given, but score is None"),
        ({"bias": np.ones((1, 3, 1, 1))}, ValueError, r"bias has shape \(1, 3, 1, 1\)"),
        (
            {"score": relative, "arrays": {"table": q}},
            TypeError,
            "the score function relative is called with",
        ),
    ):
        with pytest.raises(error, match=words):
            jax.jit(lambda q, options=options: attention(q, q, q, layout="bhsd", **options))(q)


def test_errors_name_the_argument():
    q, k, v = inputs("float32")[1:]
    with pytest.raises(ValueError, match="k has head_dim 8 but q has 32"):
        attention(q, k[..., :8], v[..., :8], layout="bhsd")
    with pytest.raises(TypeError, match="k is float16 but q is float32"):
        attention(q, k.astype(np.float16), v, layout="bhsd")
    with pytest.raises(Exception, match=r"seqlens_k\[1\] is 71"):
        attention(
            *on("cpu", q, k, v), seqlens_k=np.array([70, 71], np.int32), layout="bhsd"
        ).block_until_ready()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_mask_with_many_numbers_and_numpy_scalars(compiled):
    seqlen = 10_000  # more numbers than a mask writes as JSON
    rows = np.minimum(np.arange(seqlen) + np.random.default_rng(0).integers(1, seqlen, seqlen), seqlen)
    (q,) = on("cpu", np.ones((1, seqlen, 1, 8), np.float32))
    call = jax.grad(lambda q: attention(q, q, q, mask=cufa.masks.evict(rows), scale=np.float32(0.5)).sum())
    assert np.isfinite((jax.jit(call) if compiled else call)(q)).all()


def test_keywords_of_others_are_answered_and_ours_are_typed():
    with pytest.raises(TypeError, match=r"attention takes no is_causal: causal=True"):
        attention(None, None, None, is_causal=True)
    parameters = inspect.signature(attention).parameters.values()
    keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert keywords == {*OperatorOptions.__annotations__, "deterministic", "return_lse"}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_dropout_is_cufas(compiled):
    key = jax.random.key_data(jax.random.key(12))
    low, high = map(int, np.asarray(key))
    rng = np.random.default_rng(0)
    q, k, dout = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (9, 20, 9))

    def call(q, k, seed):
        return attention(q, k, k, layout="bhsd", dropout=0.3, seed=seed)

    for seed, same in ((7, 7), (key, low | high << 32)):
        made = jax.jit(call) if compiled and seed is key else call
        arrays = on("cpu", q, k)
        out, pull = jax.vjp(lambda q, k, made=made, seed=seed: made(q, k, seed), *arrays)
        given = {"dropout": 0.3, "seed": same}
        np.testing.assert_allclose(out, cufa.attention_reference(q, k, k, **given), atol=1e-5)
        dq, dk, dv = cufa.attention_reference_backward(dout, q, k, k, **given)
        for x, y in zip(pull(dout), (dq, dk + dv), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
