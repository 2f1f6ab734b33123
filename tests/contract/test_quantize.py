"""The contract of cufa.quantize: e4m3 with scales, rotation, the mean key, transposed values. NumPy is held to the
definition; executed kernels and a GPU to NumPy's bits."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from backends import EMULATE, GPU, MARKS, backends
from float8_support import ROLES, bits, device_array, quantize

import cufa
from cufa.build.static_compile import check_report, static_compile
from cufa.gpu.architectures import find_architecture
from cufa.kernels.quantize import SOURCE, Quantizer
from cufa.problem import float8

RNG = np.random.default_rng(45)
CU = np.array([0, 5, 5, 300, 690], np.int32)
HALF_ULP = 2.0**-4
"""The largest relative error of rounding to e4m3, of normal numbers; of subnormal ones it is 2^-10 times the scale."""


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def assert_round_trip(x, x8, scale, role, lengths=slice(None), **layout):
    """Within half a unit of the last place of the numbers that e4m3 holds."""
    back = cufa.dequantize(x8, scale, role=role, **layout)
    error = np.abs(back - x.astype(np.float64))[lengths]
    bound = np.maximum(np.abs(x.astype(np.float64)) * HALF_ULP, np.max(scale) * 2.0**-10)[lengths]
    assert (error <= bound * (1 + 1e-6)).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("per", float8.MODES)
def test_round_trip_and_shapes_of_scales(per, role, dtype):
    x = normal(2, 3, 333, 64, dtype=dtype)
    block = 64 if role == "q" else float8.key_tile(64)
    shapes = {"tensor": (), "head": (2, 3), "block": (2, 3, -(-333 // block)), "token": (2, 3, 333)}
    x8, scale = cufa.quantize(x, role=role, per=per)
    assert scale.shape == shapes[per] and scale.dtype == np.float32
    if role == "v":
        assert x8.shape == x.shape and x8.seqlen == 333 and x8.data.shape == (2, 3, 64, 384)
    else:
        assert x8.shape == x.shape and x8.dtype == ml_dtypes.float8_e4m3fn
        largest = np.abs(x8.astype(np.float32)).max(axis=(2, 3))
        assert (largest == 448).all() if per != "tensor" else largest.max() == 448
    assert_round_trip(x, x8, scale, role)


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("per", float8.MODES)
def test_packed_sequences_are_quantised_one_by_one(per, role):
    x = normal(700, 3, 96)
    x[690:] = np.nan
    x8, scale = cufa.quantize(x, role=role, per=per, cu_seqlens=CU)
    back = cufa.dequantize(x8, scale, role=role, cu_seqlens=CU)
    assert (back[690:] == 0).all()
    for start, stop in itertools.pairwise(CU):
        if per != "tensor" and stop > start:
            alone, of_it = cufa.quantize(x[None, start:stop], role=role, per=per, layout="bshd")
            np.testing.assert_array_equal(
                back[None, start:stop], cufa.dequantize(alone, of_it, role=role, layout="bshd")
            )
    assert_round_trip(x, x8, scale, role, slice(0, 690), cu_seqlens=CU)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_padding_is_not_read(role):
    x = normal(2, 300, 3, 128)
    x[0, 100:] = np.nan
    x8, scale = cufa.quantize(x, role=role, layout="bshd", seqlens=[100, 300], smooth=role == "k")
    alone, of_it = cufa.quantize(x[:1, :100], role=role, layout="bshd", smooth=role == "k")
    back = cufa.dequantize(x8, scale, role=role, layout="bshd")
    assert (back[0, 100:] == 0).all()
    np.testing.assert_array_equal(back[:1, :100], cufa.dequantize(alone, of_it, role=role, layout="bshd"))


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 128, 256])
def test_rotation_leaves_scores_unchanged(head_dim):
    """Exactly orthogonal but for rounding in float32, and with another seed not."""
    from cufa.calls.quantize import _signs
    from cufa.run.cpu.quantize import rotated

    q, k = normal(1, 2, 40, head_dim), normal(1, 2, 50, head_dim)
    signs = _signs(7, "q", head_dim)
    assert set(signs) == {1.0, -1.0}
    scores = q.astype(np.float64) @ k.astype(np.float64).mT
    square = head_dim & -head_dim
    turned = rotated(q.copy(), signs).astype(np.float64) @ rotated(k.copy(), signs).mT / square
    np.testing.assert_allclose(turned, scores, atol=1e-4)
    other = (
        rotated(q.copy(), signs).astype(np.float64) @ rotated(k.copy(), _signs(8, "k", head_dim)).mT / square
    )
    assert np.abs(other - scores).max() > 1


def test_smoothing_subtracts_the_mean_key():
    k = normal(2, 3, 1000, 64) + 50 * normal(2, 3, 1, 64)
    k8, scale = cufa.quantize(k, role="k", smooth=True)
    back = cufa.dequantize(k8, scale, role="k")
    np.testing.assert_allclose(back, k - k.mean(axis=2, keepdims=True, dtype=np.float64), atol=0.3)
    assert scale.max() < 6 / 448


def test_the_order_of_keys_is_that_of_the_fragments():
    """PTX ISA: thread t of a quad has columns 8j + 2t and 8j + 2t + 1 of accumulator tile j, and as the 8-bit A operand
    of 32 k registers with k = 4t ... 4t + 3 and 16 + 4t ... 16 + 4t + 3."""
    for t in range(4):
        in_accumulator = [8 * j + 2 * t + e for j in range(4) for e in range(2)]
        as_operand = [first + 4 * t + i for first in (0, 16) for i in range(4)]
        assert float8.KEY_ORDER[as_operand].tolist() == in_accumulator


def test_values_are_transposed_in_this_order():
    v = normal(1, 2, 70, 32)
    values, _ = cufa.quantize(v, role="v")
    rows = values.rows().view(np.uint8)
    for position in range(128):
        key = position // 32 * 32 + float8.KEY_ORDER[position % 32]
        wanted = rows[0, :, key] if key < 70 else 0
        np.testing.assert_array_equal(values.data[0, :, :, position], wanted)


def test_zeros_and_tiny_numbers_have_scales_that_are_normal():
    x = np.zeros((1, 2, 4, 16), np.float32)
    x[0, 1] = 1e-44
    x8, scale = cufa.quantize(x, role="k")
    assert scale.tolist() == [[1.0, np.float32(2.0**-126)]]
    assert not x8[0, 0].astype(np.float32).any()


def test_rounding_in_place_is_that_of_e4m3():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    between = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, between, np.nextafter(between, 448), np.nextafter(between, -448)])
    wanted = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(float8.round_to_e4m3(x.astype(np.float32)), wanted)


# --- Kernels have NumPy's bits --------------------------------------------------------------------------------

LENGTHS = {
    "dense": ((2, 150), {}),
    "padded": ((3, 150), {"seqlens": [7, 0, 150]}),
    "packed": ((330,), {"cu_seqlens": [0, 5, 5, 205, 301]}),  # 29 tokens after the last sequence
}
CASES = [
    *({"role": r, "per": m, "lengths": n} for r in "qv" for m in float8.MODES for n in ("dense", "packed")),
    {"role": "k", "lengths": "padded", "rotate": 7},
    {"role": "v", "lengths": "padded"},
    *({"role": "k", "head_dim": n, "rotate": 7} for n in (16, 32, 80, 96, 128, 144, 256)),
    *({"role": "v", "per": "token", "head_dim": n} for n in (16, 48, 128, 256)),
    {"role": "k", "per": "block", "head_dim": 128, "dtype": "float16", "rotate": 7, "narrow": True},
    {"role": "q", "per": "token", "head_dim": 48, "dtype": "float32", "rotate": 7},
    {"role": "v", "per": "tensor", "head_dim": 32, "dtype": "float32", "narrow": True},
]
ON_A_GPU = [
    *({"role": "k", "head_dim": n, "rotate": 5} for n in range(16, 257, 16)),
    *({"role": "v", "head_dim": n} for n in range(16, 257, 16)),
    *({"role": r, "per": m, "lengths": n} for r in ROLES for m in float8.MODES for n in LENGTHS),
    *(
        {"role": r, "per": m, "dtype": dtype, "head_dim": n, "rotate": None if r == "v" else rotate}
        for r, m, dtype in itertools.product(ROLES, float8.MODES, ("float16", "bfloat16", "float32"))
        for n, rotate in ((64, None), (128, 3), (80, 3), (256, None))
    ),
]


def assert_bits(backend, x, *, close=False, **options):
    """``close``: a mean key may differ in its last bit. Of 40,000 numbers few round to another e4m3, none by more."""
    found, scale = quantize(backend, x, **options)
    right, right_scale = cufa.quantize(x, **options)
    scale, found, right = backend.host(scale), bits(found).astype(int), bits(right)
    assert scale.dtype == np.float32 and scale.shape == right_scale.shape and found.shape == right.shape
    if close:
        np.testing.assert_allclose(scale, right_scale, rtol=3e-7)
        assert abs(found - right).max(initial=0) <= 1 and (found != right).mean() < 1e-3
    else:
        np.testing.assert_array_equal(scale, right_scale)
        np.testing.assert_array_equal(found, right)


def check_case(backend, role, lengths="dense", head_dim=64, dtype="bfloat16", narrow=False, **options):
    """Padding is NaN. ``narrow``: rows are not multiples of 16 bytes."""
    tokens, given = LENGTHS[lengths]
    x = normal(*tokens, 3, head_dim + 2 * narrow, dtype=dtype)[..., :head_dim]
    x += x.dtype.type(2)
    for b, n in enumerate(given.get("seqlens", ())):
        x[b, n:] = np.nan
    x[given["cu_seqlens"][-1] if lengths == "packed" else len(x) :] = np.nan
    layout = {} if lengths == "packed" else {"layout": "bshd"}
    assert_bits(backend, x, role=role, **given, **layout, **options)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, x, id=f"{backend}-{'-'.join(map(str, x.values()))}", marks=MARKS[backend.name])
        for backend, cases in ((EMULATE, CASES), (GPU, CASES + ON_A_GPU))
        for x in cases
    ],
)
def test_kernels_have_the_bits_of_the_cpu(backend, case):
    check_case(backend, **case)


@pytest.mark.parametrize("lengths", LENGTHS)
@backends("emulate", "gpu")
def test_a_mean_key(backend, lengths):
    check_case(backend, "k", lengths, 80, rotate=2, smooth=True, close=True)


# --- On a GPU alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("per", ["head", "tensor"])
@backends("gpu")
def test_more_blocks_than_a_gpu_runs_at_once(backend, per, role):
    for shape in ((1, 1, 70_000, 64), (3, 16, 2000, 128)):
        assert_bits(backend, normal(*shape, dtype="bfloat16"), role=role, per=per)
    if role == "k":
        assert_bits(
            backend, normal(2, 2, 9000, 128, dtype="bfloat16"), close=True, role=role, smooth=True, rotate=2
        )


@pytest.mark.gpu
def test_streams_side_by_side(cp):
    """Blocks of several calls share the GPU."""
    there = device_array(cp, normal(2, 32, 8192, 128, dtype="bfloat16"))
    right, right_scale = cufa.quantize(there, role="k", rotate=1)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(6)]
    cp.cuda.Device().synchronize()
    found = []
    for stream in streams * 3:
        with stream:
            found.append(cufa.quantize(there, role="k", rotate=1))
    cp.cuda.Device().synchronize()
    for k8, scale in found:
        assert (scale == right_scale).all() and (k8 == right).all()


@backends("gpu")
def test_strides(backend, cp):
    wide = device_array(cp, normal(2, 150, 4, 72, dtype="bfloat16"))
    for x in (wide[..., :64], wide[:, ::-2, :, 1:65], wide[:, :, ::2, 8:40]):
        host = x.view("i2").get().view(ml_dtypes.bfloat16)
        for role in ROLES:
            (found, scale), (right, right_scale) = (
                cufa.quantize(y, role=role, layout="bshd") for y in (x, host)
            )
            np.testing.assert_array_equal(scale.get(), right_scale)
            np.testing.assert_array_equal(bits(found), bits(right))


@backends("gpu")
def test_empty_arrays_zeros_and_what_is_not_finite(backend, cp):
    for shape, role in itertools.product(((0, 2, 8, 32), (2, 2, 0, 32), (1, 2, 8, 32)), ROLES):
        assert_bits(backend, np.zeros(shape, np.float16), role=role)
    x = normal(1, 2, 64, 64)
    x[0, 0, 3, 3], x[0, 1, 3, 3] = np.inf, np.nan
    _, scale = cufa.quantize(cp.asarray(x), role="k")
    assert np.isinf(scale.get()[0, 0]) and np.isnan(scale.get()[0, 1])


@pytest.mark.gpu
def test_lengths_on_the_gpu(cp):
    x, lengths = device_array(cp, normal(3, 300, 2, 64, dtype="bfloat16")), np.array([100, 0, 300], np.int32)
    first, second = (
        cufa.quantize(x, role="v", layout="bshd", seqlens=y) for y in (lengths, cp.asarray(lengths))
    )
    np.testing.assert_array_equal(bits(first[0]), bits(second[0]))
    np.testing.assert_array_equal(first[1].get(), second[1].get())
    with pytest.raises(TypeError, match="seqlens"):
        cufa.quantize(normal(1, 2, 8, 32), role="k", seqlens=cp.asarray([3], np.int32))


@pytest.mark.gpu
def test_quantised_in_a_graph(cp):
    """Scales and e4m3 of what the array holds at the replay."""
    x, host = (
        device_array(cp, normal(1, 2, 1000, 64, dtype="bfloat16")),
        normal(1, 2, 1000, 64, dtype="bfloat16"),
    )
    options = {"role": "k", "rotate": 1, "smooth": True}
    cufa.quantize(x, **options)
    with cp.cuda.Stream(non_blocking=True) as stream:
        cufa.quantize(x, **options)  # fills the stream's pool
        stream.synchronize()
        stream.begin_capture()
        found, scale = cufa.quantize(x, **options)
        graph = stream.end_capture()
        x.view("i2").set(host.view("i2"), stream=stream)
        graph.launch(stream)
        stream.synchronize()
        right, right_scale = cufa.quantize(host, **options)
        np.testing.assert_allclose(scale.get(), right_scale, rtol=3e-7)
        assert (bits(found) != bits(right)).mean() < 1e-3
        stream.begin_capture()
        with pytest.raises(ValueError, match="seqlens is a NumPy array"):
            cufa.quantize(x, role="k", seqlens=[7])
        stream.end_capture()


# --- Builds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build_of",
    [
        Quantizer(128, "bfloat16", 16, "dense", "head", 64, True, False, False),
        Quantizer(256, "float32", 16, "packed", "token", 64, False, False, True),
        Quantizer(96, "float16", 8, "padded", "block", 224, True, True, False),
    ],
)
def test_builds_spill_nothing_and_fit(build_of, nvrtc):
    report = static_compile(SOURCE, build_of.constants, find_architecture(90))
    assert not report.warnings and not check_report(report)
    registers = {x.name: x.registers for x in report.entries}
    for launch in build_of.launches(2, 3, 1000, 132):
        assert launch.shared_memory <= 48 << 10 and registers[launch.entry] * launch.num_threads <= 65536
    assert 1024 * registers["quantize"] <= 65536  # Quantizer.lead: 1,024 threads of an SM


def test_maxima_are_ahead_of_the_cast():
    """Of all blocks that share a scale, and of as many as a GPU runs at once; at most of all."""
    of_head = Quantizer(128, "bfloat16", 16, "dense", "head", 64, False, False, False)
    assert of_head.lead(4, 16, 4096, 132) == 64 + 4 * 132 and of_head.lead(1, 1, 4096, 132) == 64
    for mode, lengths, sharing in (
        ("tensor", "dense", 4 * 16 * 64), ("head", "packed", 2 * (32 + 4 + 1)), ("block", "dense", 5),
    ):  # fmt: skip
        other = dataclasses.replace(of_head, mode=mode, lengths=lengths, block=224)
        assert sharing <= other.lead(4, 16, 4096, 1) <= sharing + 4
    assert dataclasses.replace(of_head, mode="token").lead(4, 16, 4096, 132) == 0


# --- Errors ---------------------------------------------------------------------------------------------------

X = np.ones((1, 2, 8, 32), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        (X, {"role": "o"}, ValueError, "role='o'"),
        (X, {"role": "k", "per": "row"}, ValueError, "per='row'"),
        (X, {"role": "v", "rotate": 1}, ValueError, "values are not rotated"),
        (X, {"role": "k", "rotate": -1}, ValueError, "rotate=-1"),
        (X, {"role": "q", "smooth": True}, ValueError, "softmax is unchanged only"),
        (X, {"role": "k", "smooth": "yes"}, TypeError, "smooth"),
        (X.astype(np.float64), {"role": "k"}, TypeError, "x is float64"),
        (X[..., :24], {"role": "k"}, ValueError, "head_dim is 24"),
        (X[0], {"role": "k"}, ValueError, "x has shape"),
        (X, {"role": "k", "cu_seqlens": [0, 8]}, ValueError, "x has shape"),
        (X, {"role": "k", "seqlens": [9]}, ValueError, r"seqlens\[0\] is 9"),
        (X[0], {"role": "k", "seqlens": [2], "cu_seqlens": [0, 2]}, ValueError, "pass one of them"),
        (X[0], {"role": "k", "cu_seqlens": [0, 3]}, ValueError, r"cu_seqlens\[-1\] is 3 but x has 2 rows"),
        (X[0], {"role": "k", "cu_seqlens": [[0]]}, ValueError, r"cu_seqlens has shape \(1, 1\)"),
        (X, {"role": "k", "layout": "sbhd"}, ValueError, "layout='sbhd'"),
        (X.swapaxes(2, 3), {"role": "k"}, ValueError, "strides"),
        (np.where(X == 1, np.nan, X), {"role": "k"}, ValueError, "inf or NaN"),
        ([1.0], {"role": "k"}, TypeError, "x must be an array"),
    ],
)
def test_errors_name_the_argument(x, options, error, words):
    with pytest.raises(error, match=words):
        cufa.quantize(x, **options)


def test_dequantize_takes_arrays_of_the_host(monkeypatch):
    monkeypatch.setattr("cufa.calls.quantize.is_device_array", lambda x: True)
    with pytest.raises(TypeError, match=r"there dequantize takes dtype='bfloat16'"):
        cufa.dequantize(X, 1.0, role="k")
    with pytest.raises(ValueError, match="layout='sbhd'"):
        cufa.dequantize(X, 1.0, role="k", layout="sbhd", dtype="float16")


def test_a_rotated_sequence_may_be_empty():
    k8, _ = cufa.quantize(X[0], role="k", cu_seqlens=[0, 0, 2], rotate=1)
    assert k8.shape == (2, 8, 32)
