"""The contract of kernels for e4m3: executed and on a GPU they give what NumPy gives, which test_float8.py holds to
float64. Both round the same weights to e4m3."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import GPU, MARKS, backends
from float8_support import HEADS, KV_HEADS, ROLES, bits, device_array, error, inputs, packed, quantized

import cufa
from cufa.calls.quantize import QuantizedValues
from cufa.kernels import KERNELS

KERNEL = {"fa3": "fa3_forward_fp8", "fa2": "fa2_forward_fp8"}
ARCH = {"fa3": "sm_90", "fa2": "sm_89"}
both = pytest.mark.parametrize("algorithm", KERNEL)
uneven = functools.partial(inputs, uneven=True)


def cases(names: str, **of_backend: Any) -> pytest.MarkDecorator:
    """Parametrise over ``backend`` and ``names``."""
    rows = [
        pytest.param(backend, *row, marks=MARKS[str(backend.values[0])], id=f"{backend.id}-{row}")
        for name, of_name in of_backend.items()
        for backend in backends(name).args[1]
        for row in of_name
    ]
    return pytest.mark.parametrize(("backend", *names.split()), rows)


def call_of(algorithm: str, options: dict[str, Any]) -> Any:
    """The public call on a GPU by this kernel, which other GPUs may lack."""
    import cupy

    if not KERNELS[KERNEL[algorithm]].runs_on(int(cupy.cuda.Device().compute_capability)):
        pytest.skip(f"{KERNEL[algorithm]} does not run on this GPU")
    call = cufa.flash_attention_varlen if "cu_seqlens_q" in options else cufa.flash_attention
    return functools.partial(call, algorithm=algorithm)


def in_rows(given: dict[str, Any]) -> dict[str, Any]:
    """As bytes, values in rows."""
    found = given | {"v": given["v"].rows()}
    return {name: x.view(np.uint8) if name in ROLES else x for name, x in found.items()}


def there(cp: Any, given: dict[str, Any]) -> dict[str, Any]:
    """On the GPU, as bytes."""
    found = {name: cp.asarray(bits(x) if name in ROLES else x) for name, x in given.items()}
    if isinstance(v := given["v"], QuantizedValues):
        found["v"] = dataclasses.replace(v, data=found["v"], scale=found["v_scale"])
    return found


def run(backend: Any, algorithm: str, given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """out and lse, written to NaN."""
    if backend is not GPU:
        how = {"algorithm": algorithm, "arch": ARCH[algorithm], "mode": "checked"}
        done = cufa.emulate(**given, **options, **how)
        assert not done.findings and done.plan.spec.name == KERNEL[algorithm]
        return done.out, done.lse
    import cupy as cp

    tokens, heads = (0, 1) if "cu_seqlens_q" in options else (2, 1)
    shape = (given["q"].shape[heads], given["q"].shape[tokens])
    lse = cp.full(shape if tokens == 0 else (len(given["q"]), *shape), np.nan, np.float32)
    out = device_array(cp, np.full(given["q"].shape, np.nan, ml_dtypes.bfloat16))
    call = call_of(algorithm, options)
    assert call(**there(cp, given), **options, return_lse=True, out=out, lse=lse) == (out, lse)
    return out.view("i2").get().view(ml_dtypes.bfloat16), lse.get()


def check(backend: Any, algorithm: str, given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """NumPy's out and lse, but for scores that differ in their last bits and sums of 14 bits in tensor cores; on a GPU
    the same bits from values in rows and transposed."""
    call = cufa.flash_attention_varlen if "cu_seqlens_q" in options else cufa.flash_attention
    right, right_lse = call(**given, **options, return_lse=True, out_dtype="float32", device="cpu")
    out, lse = run(backend, algorithm, given, **options)
    if backend is GPU:
        assert_same(run(backend, algorithm, in_rows(given), **options), (out, lse))
    out = out.astype(np.float32)
    assert np.isfinite(out).all() and error(out, right) < (8e-3 if backend is GPU else 5e-3)
    np.testing.assert_allclose(lse, right_lse, atol=1e-3 if backend is GPU else 2e-4)
    return out, lse


def assert_same(found: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for x, y in zip(found, other, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@both
@pytest.mark.parametrize("accumulate", ["row", 2, "tile"])
@cases(
    "head_dim seqlen_q seqlen_k options",
    emulate=[
        (64, 200, 500, {}),
        (16, 70, 333, {"causal": True}),
        (128, 130, 700, {"causal": True}),
        (144, 90, 300, {"window": (100, 20)}),
        (256, 140, 300, {"causal": True}),
    ],
    gpu=[(d, 200, 500, {"causal": d % 32 == 0}) for d in range(16, 257, 16)],
)
def test_dense(backend, head_dim, seqlen_q, seqlen_k, options, accumulate, algorithm):
    x = uneven(head_dim, seqlen_q, seqlen_k, 2 if backend is GPU else 1)
    check(backend, algorithm, quantized(x), **options, accumulate=accumulate)


@pytest.mark.sampled(fixed=3, dated=3, on="emulate")
@both
@cases(
    "head_dim per options",
    emulate=[
        (96, ("tensor",) * 3, {}),
        (96, ("head", "tensor", "head"), {"softcap": 20.0}),
        (128, ("block", "block", "head"), {"causal": True}),
    ],
    gpu=[
        (d, per, options)
        for d in (64, 128, 192, 256)
        for per in (("tensor",) * 3, ("block", "block", "head"), ("head", "block", "tensor"))
        for options in ({"window": (300, 40)}, {"softcap": 5.0, "accumulate": "tile"})
    ],
)
def test_scales(backend, head_dim, per, options, algorithm):
    seqlens = (333, 777) if backend is GPU else (130, 500)
    check(backend, algorithm, quantized(uneven(head_dim, *seqlens), per), **options)


def exact(given: dict[str, Any], **options: Any) -> Any:
    """Attention of the same e4m3 numbers, without rounding of weights."""
    x = (cufa.dequantize(given[role], given[f"{role}_scale"], role=role) for role in ROLES)
    return cufa.flash_attention(*x, **options, return_lse=True, device="cpu")


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("per", [("head",) * 3, ("block", "block", "tensor")], ids=str)
@cases(
    "head_dim seqlen_q seqlen_k options",
    emulate=[
        (64, 70, 900, {"causal": True}),
        (128, 40, 900, {"accumulate": "tile"}),
        (128, 150, 1000, {"window": (300, 20)}),
        (256, 130, 120, {"causal": True, "softcap": 20.0}),  # the first rows see no key
    ],
    gpu=[
        (d, n, 5000, options)
        for d in (64, 96, 128, 192, 256)
        for n in (16, 64, 200)
        for options in ({"causal": True}, {"window": (3000, 0), "accumulate": "tile"}, {"softcap": 20.0})
    ],
)
def test_split_keys(backend, head_dim, seqlen_q, seqlen_k, options, per, heads, monkeypatch):
    """One or two heads in a tile. Splits end at borders of key tiles. Weights are rounded relative to the maximum of
    their split: as exact as one pass over all keys. Values in rows give the same bits."""
    kernel = KERNELS[KERNEL["fa3"]]
    monkeypatch.setattr(kernel, "split_configs", [x for x in kernel.split_configs if x.packed_heads == heads])
    given = quantized(uneven(head_dim, seqlen_q, seqlen_k, 1), per)
    right, right_lse = exact(given, **{x: y for x, y in options.items() if x != "accumulate"})
    counts = 1, 2 * heads, 2 * heads + 1  # a warm call would have the plan of its number
    whole, *parts = (run(backend, "fa3", given, **options, num_splits=n) for n in counts)
    once = error(whole[0].astype(np.float32), right)
    for out, lse in parts:
        assert error(out.astype(np.float32), right) < 1.05 * once + 1e-4
        np.testing.assert_allclose(lse, right_lse, atol=1e-3 if backend is GPU else 2e-4)
    assert_same(run(backend, "fa3", in_rows(given), **options, num_splits=counts[2]), parts[1])


@cases("", emulate=[()], gpu=[()])
def test_split_keys_of_padded_sequences(backend):
    """Padding is NaN; a sequence has no query, and another fewer keys than a tile."""
    rows, keys = [100, 0, 33], [650, 7, 20]
    x = uneven(128, 110, 700, 3)
    for y, lengths in zip(x, (rows, keys, keys), strict=True):
        for b, n in enumerate(lengths):
            y[b, :, n:] = 0
    given, options = quantized(x), {"seqlens_q": rows, "seqlens_k": keys, "causal": True}
    right, right_lse = exact(given, **options)
    for name, lengths in (("q", rows), ("k", keys)):
        for b, n in enumerate(lengths):
            given[name][b, :, n:] = np.nan
    out, lse = run(backend, "fa3", given, **options, num_splits=3)
    assert error(out.astype(np.float32), right) < 0.03
    np.testing.assert_allclose(lse, right_lse, atol=1e-3)


@cases("", emulate=[()])
def test_splits_that_a_plan_cannot_have(backend):
    given = quantized(uneven(128, 40, 900, 1))
    how = {"algorithm": "fa3", "arch": "sm_90", "num_splits": 9}
    done = cufa.emulate(**given, **how)
    assert done.plan.num_splits == 5  # 900 keys are five tiles
    assert sorted(done.records["first_tile"]) == sorted([0, 1, 2, 3, 4] * HEADS)
    with pytest.raises(ValueError, match="splits keys with accumulate='row' or 'tile', not 2"):
        cufa.emulate(**given, **how, accumulate=2)


OPTIONS = {"full": {}, "causal": {"causal": True}, "window": {"window": (64, 0)}}


@both
@pytest.mark.parametrize("options", OPTIONS)
@cases("head_dim", emulate=[(64,)], gpu=[(64,), (96,), (128,), (256,)])
def test_padded(backend, head_dim, options, algorithm):
    """Padding is NaN, in keys and values too. A sequence has no key, another no query."""
    rows, keys = ([300, 7, 0], [400, 0, 129]) if backend is GPU else ([100, 0, 33], [300, 7, 0])
    x = uneven(head_dim, max(rows) + 10, max(keys) + 10, 3)
    for y, seqlens in zip(x, (rows, keys, keys), strict=True):
        for b, n in enumerate(seqlens):
            y[b, :, n:] = 0
    given = quantized(x)
    for b, n in enumerate(keys):
        given["k"][b, :, n:] = np.nan
    if backend is GPU:
        check(backend, algorithm, given, seqlens_k=keys, softcap=20.0, **OPTIONS[options])
    for b, n in enumerate(rows):
        given["q"][b, :, n:] = np.nan
    out, lse = check(backend, algorithm, given, seqlens_q=rows, seqlens_k=keys, **OPTIONS[options])
    for b, n in enumerate(rows):
        assert not out[b, :, n:].any() and (keys[b] or (not out[b].any() and np.isneginf(lse[b]).all()))


@pytest.mark.sampled(fixed=1, dated=2, on="emulate")
@both
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("per", [("head",) * 3, ("block", "block", "head")], ids=str)
@cases("head_dim", emulate=[(128,)], gpu=[(64,), (96,), (128,), (256,)])
def test_packed(backend, head_dim, per, options, algorithm):
    """Rows after the last sequence have no scales: none is read for them. Offsets on the GPU give the same bits."""
    cu_q, cu_k = (
        ([0, 300, 307, 430], [0, 400, 400, 790]) if backend is GPU else ([0, 70, 71, 201], [0, 300, 340, 469])
    )
    given = packed(uneven(head_dim, cu_q[-1] + 7, cu_k[-1] + 10, 1), per, cu_q, cu_k)
    how = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **OPTIONS[options]}
    out, lse = check(backend, algorithm, given, **how)
    assert not out[cu_q[-1] :].any() and np.isneginf(lse[:, cu_q[-1] :]).all()
    if algorithm == "fa3":  # weights are rounded relative to the maximum of their split
        split, split_lse = run(backend, algorithm, given, **how, num_splits=2)
        assert error(split.astype(np.float32), out) < 0.03
        np.testing.assert_allclose(split_lse, lse, atol=1e-3)
    if backend is GPU:
        import cupy as cp

        how |= {name: cp.asarray(how[name], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        found = call_of(algorithm, how)(**there(cp, given), **how)
        np.testing.assert_array_equal(found.view("i2").get().view(ml_dtypes.bfloat16).astype(np.float32), out)


@both
@pytest.mark.parametrize("lengths", ["dense", "padded", "packed"])
@cases("head_dim", emulate=[(16,), (48,), (128,), (256,)])
def test_values_in_rows_are_transposed_first(backend, head_dim, lengths, algorithm):
    """The same bits as from values that were transposed before."""
    x, options = inputs(head_dim, 133, 307), dict[str, Any]()
    given = quantized(x)
    if lengths == "padded":
        options = {"seqlens_q": [100, 33], "seqlens_k": [300, 7]}
        given["v"], given["v_scale"] = cufa.quantize(x[2], role="v", seqlens=[300, 7])
    if lengths == "packed":
        options = {"cu_seqlens_q": [0, 100, 133], "cu_seqlens_k": [0, 300, 307]}
        given = packed(x, ("head",) * 3, *options.values())
    how = {"algorithm": algorithm, "arch": ARCH[algorithm], "mode": "checked"}
    done = cufa.emulate(**in_rows(given), **options, **how)
    assert not done.findings
    assert [x.entry for x in done.plan.launches] == ["transpose_values", KERNEL[algorithm]]
    positions = 128 * (307 // 128 + 2) if lengths == "packed" else 2 * 384
    assert done.plan.workspace == KV_HEADS * head_dim * positions
    assert_same((done.out, done.lse), run(backend, algorithm, given, **options))


@pytest.mark.parametrize(
    "call",
    [
        "await_copies<0>(inside, j, SCORES);",
        "await_copies<0>(inside, j, VALUES);",
        "block_sync();  // the parked values are visible",
    ],
)
@cases("", emulate=[()])
def test_a_barrier_that_is_left_out_is_found(backend, plant, call):
    """The last run has a sequence without keys."""
    plant("forward/fa2_fp8/kernel.cu", call, "")
    given = quantized(inputs(64, 150, 500))
    padded = {"seqlens_q": [150, 100], "seqlens_k": [500, 0]}
    given["v"] = in_rows(given)["v"]
    how = {"algorithm": "fa2", "arch": "sm_89", "mode": "checked"}
    assert any(cufa.emulate(**given, **how, **options).findings for options in ({}, padded))


# --- On a GPU alone ---------------------------------------------------------------------------------------


@both
@pytest.mark.gpu
def test_strides_layouts_and_dtypes(cp, algorithm):
    attention = call_of(algorithm, {})
    given = quantized(inputs(64))
    rows = there(cp, in_rows(given))
    right = attention(**rows, causal=True)
    turned = rows | {role: cp.ascontiguousarray(rows[role].swapaxes(1, 2)) for role in ROLES}
    out = attention(**turned, causal=True, layout="bshd")
    np.testing.assert_array_equal(bits(out.swapaxes(1, 2).copy()), bits(right))
    half = attention(**rows, causal=True, out_dtype="float16")
    assert half.dtype == np.float16
    wide = right.view("i2").get().view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(half.get().astype(np.float32), wide, atol=2e-2)
    v, _ = cufa.quantize(cp.asarray(inputs(64)[2]), role="v")
    other = attention(**rows | {"v": v, "v_scale": None}, causal=True)
    np.testing.assert_array_equal(bits(other), bits(right))
    host = given | {"v": given["v"].rows()}
    for device in (None, "cuda"):
        np.testing.assert_array_equal(bits(attention(**host, causal=True, device=device)), bits(right))
    assert isinstance(attention(**host, out_dtype="float32"), np.ndarray)


@both
@pytest.mark.gpu
def test_calls_that_look_alike(cp, algorithm):
    """Rows and transposed values of one shape; results of two dtypes; repeated calls with other numbers."""
    attention = call_of(algorithm, {})
    x = inputs(128, 128, 128)
    rows, columns = there(cp, in_rows(quantized(x))), there(cp, quantized(x))
    assert rows["v"].shape == columns["v"].data.shape
    right = bits(attention(**rows))
    for _ in range(2):
        for given in (rows, columns):
            np.testing.assert_array_equal(bits(attention(**given)), right)
            assert attention(**given, out_dtype="float16").dtype == np.float16
    other = there(cp, in_rows(quantized([y[:, ::-1].copy() for y in x])))
    np.testing.assert_array_equal(bits(attention(**other).get()[:, ::-1].copy()), right)


@both
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True])
def test_in_a_graph(cp, rows, algorithm):
    attention = call_of(algorithm, {})
    first, second = (quantized(inputs(128, n, 600)) for n in (300, 301))
    given, other = (there(cp, in_rows(x) if rows else x) for x in (first, second))
    other = {name: x[:, :, :300].copy() if name == "q" else x for name, x in other.items()}
    out = device_array(cp, np.zeros((2, HEADS, 300, 128), ml_dtypes.bfloat16))
    right = bits(attention(**other))
    attention(**given, out=out)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        attention(**given, out=out)
        graph = stream.end_capture()
        for name, x in given.items():
            x, y = (z.data if isinstance(z, QuantizedValues) else z for z in (x, other[name]))
            x[...] = y
        for _ in range(2):
            out.view("i2").fill(0)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(bits(out), right)


@both
@pytest.mark.gpu
def test_long_rows_need_sums_of_tiles(cp, algorithm):
    """Equal positive values: the tensor core's sums lose what is small against them."""
    attention = functools.partial(call_of(algorithm, {}), out_dtype="float16")
    shape = 1, 1, 65536, 64
    q, k = np.zeros((1, 1, 64, 64), np.float32), np.zeros(shape, np.float32)
    v = np.abs(np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    given = quantized([q, k, v])
    exact = cufa.dequantize(given["v"], given["v_scale"], role="v").mean(axis=2)
    given, whole = there(cp, given), {"num_splits": 1}  # a split adds fewer tiles
    found = {x: attention(**given, **whole, accumulate=x) for x in ("tile", "row")}
    tile, row = (abs(x.get().astype(np.float64) - exact[:, :, None]).max() for x in found.values())
    assert tile < 1e-3 * exact.max() and tile <= row
    np.testing.assert_array_equal(bits(attention(**given, **whole)), bits(found["tile"]))


@both
@pytest.mark.gpu
def test_errors_come_before_a_launch(cp, algorithm):
    attention = call_of(algorithm, {})
    given = there(cp, in_rows(quantized(inputs(64, 8, 8, 1))))
    with pytest.raises(TypeError, match=r"k_scale is float64.*ascontiguousarray"):
        attention(**given | {"k_scale": cp.ones((1, KV_HEADS))})
    with pytest.raises(TypeError, match="k is"):
        attention(**given | {"k": given["k"].get()})
