"""The quantiser on the executor: scales and e4m3 bit by bit those of its NumPy twin."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cufa.build.static_compile import check_report, static_compile
from cufa.calls.quantize import _signs
from cufa.gpu.architectures import find_architecture
from cufa.kernels.quantize import NUM_MEMBERS, PARAMETER, SOURCE, Quantizer
from cufa.problem import float8
from cufa.problem.lengths import DENSE, Lengths, Packed, Padded
from cufa.run.cpu import quantize as twin
from cufa.run.emulate import build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

PACKED = Packed(330, 330, (5, 0, 200, 96), (5, 0, 200, 96))  # 29 tokens behind the last sequence
PADDED = Padded((7, 150), (7, 150))


def both(
    role: str, mode: str, head_dim: int = 64, lengths: Lengths = DENSE, dtype: str = "bfloat16",
    rotate: bool = False, smooth: bool = False, alignment: int = 16, num_sms: int = 1,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:  # fmt: skip
    """(e4m3, scale) of the kernels and of the twin. Padding in x is NaN."""
    rng = np.random.default_rng(head_dim)
    packed, heads, transpose = isinstance(lengths, Packed), 3, role == "v"
    batch, seqlen = (1, 330) if packed else (2, 150)
    room = np.zeros(
        (batch, seqlen, heads, head_dim + 8 * (alignment < 16) // 4), getattr(ml_dtypes, dtype, dtype)
    )
    room[..., :head_dim] = rng.standard_normal((batch, seqlen, heads, head_dim)) + 3
    x = room[..., :head_dim].swapaxes(1, 2)
    sequences = len(lengths.keys) if isinstance(lengths, (Packed, Padded)) else batch
    valid = np.zeros((batch, seqlen), bool)
    for _, where, _, rows in twin.places_of(lengths):
        valid[where, rows] = True
    x.swapaxes(1, 2)[~valid] = np.nan
    block = float8.block_of(role, head_dim)
    scales = [
        np.full(float8.scale_shape(mode, block, heads, sequences, seqlen, lengths), z, np.float32)
        for z in (0, 9)
    ]
    keys = float8.padded_keys(seqlen, sequences if packed else None)
    shape = (batch, heads, head_dim, keys) if transpose else x.shape
    found = [np.full(shape, 0x55, np.uint8) for _ in range(2)]
    signs = _signs(7, role, head_dim) if rotate else None
    twin.quantize(x, found[1], scales[1], lengths, mode, block, signs, smooth, transpose)

    quantizer = Quantizer(head_dim, dtype, alignment, lengths.kind, mode, block, rotate, smooth, transpose)
    bits = b"" if signs is None else np.packbits(signs < 0).tobytes()
    given = {PACKED: [0, *np.cumsum(PACKED.keys or ())], PADDED: PADDED.keys}.get(lengths, [0])
    of_sums, of_means = quantizer.workspace(sequences, heads, seqlen)
    count = scales[0].size
    words = np.zeros(count + quantizer.zeros(sequences, heads, seqlen), np.float32)
    words[:count] = np.nan if lengths is DENSE else 1
    memory = [
        GlobalArray(name, y, writable)
        for name, y, writable in (
            ("x", room, False), ("out", found[0], True), ("words", words, True),
            ("sums", np.full(max(of_sums, 1) // 8 + 1, np.nan), True),
            ("mean", np.full(max(of_means, 1) // 4 + 1, np.nan, np.float32), True),
            ("lengths", np.array(given, np.int32), False),
        )
    ]  # fmt: skip
    numbers = quantizer.numbers([y.address for y in memory], bits, x, found[0], sequences, count, num_sms)
    assert len(numbers) == NUM_MEMBERS
    launches = quantizer.launches(sequences, heads, seqlen, num_sms)
    entries = build.kernel(SOURCE, quantizer.constants, [y.entry for y in launches], True, (PARAMETER,))
    argument = (ctypes.c_int64 * NUM_MEMBERS)(*numbers)
    for launch in launches:
        _, findings = execute(entries[launch.entry], launch, [argument], memory, Execution("checked"))
        assert not findings
    scales[0][...] = words[:count].reshape(scales[0].shape)
    return (found[0], scales[0]), (found[1], scales[1])


CASES: list[dict[str, Any]] = [
    *(
        {"role": role, "mode": mode, "lengths": lengths}
        for role in "qv" for mode in float8.MODES for lengths in (DENSE, PACKED)
    ),
    {"role": "k", "mode": "head", "lengths": PADDED, "rotate": True},
    {"role": "v", "mode": "head", "lengths": PADDED},
    *({"role": "k", "mode": "head", "head_dim": n, "rotate": True} for n in (16, 32, 80, 96, 128, 144, 256)),
    *({"role": "v", "mode": "token", "head_dim": n} for n in (16, 48, 128, 256)),
    {"role": "k", "mode": "block", "head_dim": 128, "dtype": "float16", "rotate": True, "alignment": 4},
    {"role": "q", "mode": "token", "head_dim": 48, "dtype": "float32", "rotate": True},
    {"role": "v", "mode": "tensor", "head_dim": 32, "dtype": "float32", "alignment": 8},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda x: "-".join(map(str, x.values())).replace(" ", ""))
def test_the_twins_bits(case: dict[str, Any]) -> None:
    (e4m3, scale), (right, right_scale) = both(**case)
    np.testing.assert_array_equal(scale, right_scale)
    np.testing.assert_array_equal(e4m3, right)


@pytest.mark.parametrize("lengths", [DENSE, PADDED, PACKED])
def test_a_mean_key_may_differ_in_its_last_bit(lengths: Lengths) -> None:
    """float64 sums in another order: of 40,000 numbers few can round to another float32, and none by more."""
    (e4m3, scale), (right, right_scale) = both("k", "head", 80, lengths, rotate=True, smooth=True)
    np.testing.assert_allclose(scale, right_scale, rtol=3e-7)
    steps = e4m3.astype(int) - right
    assert np.abs(steps[e4m3 != right]).max(initial=0) <= 1 and (steps != 0).mean() < 1e-3


@pytest.mark.parametrize(
    "build_of",
    [
        Quantizer(128, "bfloat16", 16, "dense", "head", 64, True, False, False),
        Quantizer(256, "float32", 16, "packed", "token", 64, False, False, True),
        Quantizer(96, "float16", 8, "padded", "block", 224, True, True, False),
    ],
)
def test_builds_spill_nothing_and_fit(build_of: Quantizer, nvrtc: None) -> None:
    report = static_compile(SOURCE, build_of.constants, find_architecture(90))
    assert not report.warnings and not check_report(report)
    registers = {x.name: x.registers for x in report.entries}
    for launch in build_of.launches(2, 3, 1000, 132):
        assert launch.shared_memory <= 48 << 10 and registers[launch.entry] * launch.num_threads <= 65536
    assert 1024 * registers["quantize"] <= 65536  # Quantizer.lead: 1,024 threads of an SM


def test_maxima_are_ahead_of_the_cast() -> None:
    """Of all blocks that share a scale, and of as many as a GPU runs at once; at most of all."""
    of_head = Quantizer(128, "bfloat16", 16, "dense", "head", 64, False, False, False)
    assert of_head.lead(4, 16, 4096, 132) == 64 + 4 * 132 and of_head.lead(1, 1, 4096, 132) == 64
    for mode, lengths, sharing in (
        ("tensor", "dense", 4 * 16 * 64), ("head", "packed", 2 * (32 + 4 + 1)), ("block", "dense", 5),
    ):  # fmt: skip
        other = dataclasses.replace(of_head, mode=mode, lengths=lengths, block=224)
        assert sharing <= other.lead(4, 16, 4096, 1) <= sharing + 4
    assert dataclasses.replace(of_head, mode="token").lead(4, 16, 4096, 132) == 0
