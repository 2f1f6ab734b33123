"""What each probe must give, computed with NumPy from its inputs and the layouts that PTX states: the third
opinion beside a GPU and the host twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
from probes import _KINDS, Probe


@dataclasses.dataclass(frozen=True)
class Expected:
    """Words, or float32 values with an allowed error."""

    values: np.ndarray
    """u32: the same bits are asked for. float32: NaN where NaN is, else within ``tolerance``."""
    tolerance: np.ndarray | float = 0.0
    """Absolute."""


def assert_as_expected(probe: Probe, got: np.ndarray) -> None:
    """``got``: the u32 words that the probe wrote."""
    expected = expected_of(probe)
    values = expected.values.ravel()
    if values.dtype == np.uint32:
        np.testing.assert_array_equal(got, values)
        return
    floats = got.view(np.float32)
    np.testing.assert_array_equal(np.isnan(floats), np.isnan(values))
    tolerance = np.broadcast_to(expected.tolerance, expected.values.shape).ravel()
    with np.errstate(invalid="ignore"):
        off = ~((floats == values) | (np.abs(floats.astype(np.float64) - values) <= tolerance))
    off &= ~np.isnan(values)
    assert not off.any(), f"{np.flatnonzero(off)[:4]}: {floats[off][:4]}, expected {values[off][:4]}"


def expected_of(probe: Probe) -> Expected:
    name, kind = probe.name, probe.name.rpartition("_")[2]
    if name in _OF_PAIRS:
        with np.errstate(all="ignore"):
            return _OF_PAIRS[name](*probe.inputs.view(np.float32).reshape(-1, 2).T)
    if name.startswith("mma_"):
        return _products(probe, kind)
    if name.startswith("wgmma_tiles"):
        return _tiles(probe)
    if name.startswith("wgmma_") and not name.startswith("wgmma_transposed"):
        return _warpgroup_products(probe)
    return globals()[f"_{name}"](probe)


# ---- one float32 or a pair of them at a time


def _flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 numbers become zeros: kernels are compiled with -ftz=true."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x).astype(np.float32)


def _approximation(function, x: np.ndarray, relative: float, absolute: float = 0.0) -> Expected:
    exact = function(_flushed(x).astype(np.float64))
    values = _flushed(exact.astype(np.float32))
    tolerance, tiny = np.abs(exact) * relative + absolute, np.finfo(np.float32).tiny
    # Around the smallest normal number a rounding decides whether the result is flushed.
    tolerance += np.where(np.abs(np.abs(exact) - tiny) <= 4 * relative * tiny, tiny, 0)
    return Expected(values, np.where(np.isfinite(values), tolerance, 0))


def _fmaf(a: np.ndarray, b: np.ndarray) -> Expected:
    exact = _flushed(a).astype(np.float64) * 1.5 + _flushed(b)
    values = _flushed(exact.astype(np.float32))
    ulp = np.spacing(np.abs(values)).astype(np.float64)
    # An addend too small for the float64 sum still decides which way a tie of float32 goes.
    tie = np.isfinite(values) & (np.abs(exact - values) == ulp / 2)
    return Expected(values, np.where(tie, ulp, 0))


def _fma_sat(a: np.ndarray, b: np.ndarray) -> Expected:
    exact = _flushed(a).astype(np.float64) * 1.5 + _flushed(b)
    values = _flushed(np.where(exact > 0, np.minimum(exact, 1), 0).astype(np.float32))  # NaN gives 0
    return Expected(values, np.where((values > 0) & (values < 1), np.spacing(values).astype(np.float64), 0))


def _packed(low: np.ndarray, high: np.ndarray) -> Expected:
    """16-bit values in pairs; NaN is 0x7fff."""
    halves = [
        np.where(np.isnan(x.astype(np.float32)), np.uint16(0x7FFF), x.view(np.uint16)).astype(np.uint32)
        for x in (low, high)
    ]
    return Expected(halves[0] | halves[1] << 16)


def _lower_half(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & 0xFFFF).astype(np.uint16)


def _cvt_tf32(a: np.ndarray, b: np.ndarray) -> Expected:
    """Half a unit of the eleventh bit added to the magnitude, the rest cut off: ties go away from zero."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return Expected(np.where(bits & 0x7FFFFFFF >= 0x7F800000, bits, rounded).view(np.float32))


def _cvt_e4m3x2(*pair: np.ndarray) -> Expected:
    rounded = [np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in pair]
    low, high = (
        np.where(x & 0x7F == 0x7F, 0x7F, x).astype(np.uint32) for x in rounded
    )  # one NaN, without sign
    return Expected(low | high << 8)


#: By probe: of two float32 arrays.
_OF_PAIRS: dict[str, Callable[[np.ndarray, np.ndarray], Expected]] = {
    "ex2": lambda a, b: _approximation(np.exp2, a, 2.0**-22),
    "lg2": lambda a, b: _approximation(np.log2, a, 2.0**-21, 2.0**-21),
    "rcp": lambda a, b: _approximation(np.reciprocal, a, 2.0**-23),
    "fmaxf": lambda a, b: Expected(np.fmax(_flushed(a), _flushed(b))),
    "fminf": lambda a, b: Expected(np.fmin(_flushed(a), _flushed(b))),
    "fmaf": _fmaf,
    "fma_sat": _fma_sat,
    "cvt_f16x2": lambda a, b: _packed(a.astype(np.float16), b.astype(np.float16)),
    "cvt_f16x2_satfinite": lambda *pair: _packed(
        *(np.clip(x, -65504, 65504).astype(np.float16) for x in pair)
    ),
    "cvt_bf16x2": lambda a, b: _packed(a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)),
    "cvt_f32_f16": lambda a, b: Expected(_lower_half(a).view(np.float16).astype(np.float32)),
    "cvt_f32_bf16": lambda a, b: Expected(_lower_half(a).astype(np.uint32) << 16),
    "cvt_tf32": _cvt_tf32,
    "cvt_e4m3x2": _cvt_e4m3x2,
}


def _cvt_f16x2_e4m3x2(probe: Probe) -> Expected:
    halves = np.stack([probe.inputs & 0xFF, probe.inputs >> 8 & 0xFF]).astype(np.uint8)
    return _packed(*halves.view(ml_dtypes.float8_e4m3fn).astype(np.float16))


def _byte_permute(probe: Probe) -> Expected:
    words = probe.inputs.reshape(-1, 3)
    eight = np.ascontiguousarray(words[:, :2]).view(np.uint8)
    selector = words[:, 2:] >> (4 * np.arange(4, dtype=np.uint32)) & 7
    picked = np.take_along_axis(eight, selector.astype(np.intp), 1)
    return Expected(np.ascontiguousarray(picked).view(np.uint32))


def _atomic_inc_wrap(probe: Probe) -> Expected:
    """As many threads find a value as it takes rounds from 0 to ``last``."""
    olds = np.arange(32 * probe.blocks) % (int(probe.inputs[0]) + 1)
    final = len(olds) % (int(probe.inputs[0]) + 1)
    return Expected(
        np.concatenate([[final], np.bincount(olds, minlength=probe.outputs - 1)]).astype(np.uint32)
    )


# ---- memory and exchange


def _lanes(probe: Probe) -> np.ndarray:
    """(blocks, 32 lanes, words)"""
    return probe.inputs.reshape(probe.blocks, 32, -1)


LANE = np.arange(32)


def _shared(probe: Probe) -> Expected:
    other = _lanes(probe)[0][LANE ^ 5]
    out = np.zeros((32, 7, 4), np.uint32)
    out[:, :5] = other[:, None]
    out[:, 5] = np.stack([other[:, 0] >> 16, other[:, 1], other[:, 2], other[:, 3]], 1)
    out[:, 6, 0], out[:, 6, 1] = other[:, 0], 48
    return Expected(out)


def _global(probe: Probe) -> Expected:
    return Expected(probe.inputs)


def _special_registers(probe: Probe) -> Expected:
    """The clock runs forwards, the SM's number is sensible, every old value is below the sum."""
    total = np.uint32((probe.inputs & 0xFF).sum())
    return Expected(np.concatenate([[total], 7 + 8 * LANE]).astype(np.uint32))


def _stamps(probe: Probe) -> Expected:
    """Words where they are odd; both clocks run forwards and agree."""
    words = np.stack([probe.inputs, ~probe.inputs], 1) * (probe.inputs % 2)[:, None]
    return Expected(np.concatenate([words.ravel(), np.full(32, 3)]).astype(np.uint32))


def _cp_async(probe: Probe) -> Expected:
    words = _lanes(probe)[0]
    out = np.zeros((32, 3, 4), np.uint32)
    out[:, 0] = np.where((LANE % 3 != 0)[:, None], words, 0)
    for i in range(2):
        pair = slice(2 * i, 2 * i + 2)
        out[:, 1, pair] = np.where(((LANE + i) % 3 != 0)[:, None], words[:, pair], 0)
    for i in range(3):
        out[:, 2, i] = np.where((LANE + i) % 3 != 0, words[:, i], 0)
    out[:, 2, 3] = 4  # not copied
    return Expected(out[31 - LANE])


def _ldmatrix(probe: Probe) -> Expected:
    matrices = _lanes(probe)[0][(LANE * 5 + 3) % 32].reshape(4, 8, 4)  # (matrix, row, word)
    halves = np.ascontiguousarray(matrices).view(np.uint16).astype(np.uint32)  # (matrix, row, column)
    g, t = LANE // 4, LANE % 4
    plain = matrices[:, g, t].T
    transposed = (halves[:, 2 * t, g] | halves[:, 2 * t + 1, g] << 16).T
    pairs = np.concatenate([plain[:, :2], transposed[:, :2]], 1)
    return Expected(np.stack([plain, transposed, pairs], 1))


def _stmatrix(probe: Probe) -> Expected:
    """Row r of matrix m lies where lane 8 m + r says; lane 4 g + t holds columns 2 t and 2 t + 1 of row g."""
    halves = np.ascontiguousarray(_lanes(probe)[0]).view(np.uint16).reshape(8, 4, 4, 2)  # (g, t, m, which)
    matrices = halves.transpose(2, 0, 1, 3).reshape(4, 8, 8)
    out = np.zeros((2, 32, 8), np.uint16)
    out[0, (LANE * 5 + 3) % 32] = matrices.reshape(32, 8)
    out[1, (LANE * 5 + 3) % 32] = matrices.transpose(0, 2, 1).reshape(32, 8)
    return Expected(out.view(np.uint32))


def _red_add(probe: Probe) -> Expected:
    """Every fourth thread adds to the same seven sums; the eighth word of each row is left alone."""
    numbers = probe.inputs.view(np.float32).reshape(-1, 4, 7)
    out = np.zeros((4, 8), np.float32)
    out[:, :7] = numbers.sum(0)
    return Expected(out.view(np.uint32))


def _red_add_u64(probe: Probe) -> Expected:
    """Sums modulo 2^64."""
    return Expected(probe.inputs.view(np.uint64).reshape(-1, 4).sum(0).view(np.uint32))


def _red_max(probe: Probe) -> Expected:
    return Expected(probe.inputs.reshape(-1, 4).max(0))


def _bulk_add(probe: Probe) -> Expected:
    sums = probe.inputs.view(np.float32).reshape(-1, 128).sum(0)
    return Expected(np.concatenate([sums, sums[64:]]).astype(np.float32).view(np.uint32))


def _wgmma_transposed(probe: Probe) -> Expected:
    """V is taken from its column 32 on."""
    A, V = np.split(_unswizzled(probe), 2)
    return _of_warpgroup(A, V[:, 32:])


def _unswizzled(probe: Probe) -> np.ndarray:
    """Rows of 64: 16-byte unit u of row r lies at unit u ^ (r % 8)."""
    stored = probe.inputs.view(ml_dtypes.bfloat16).reshape(-1, 8, 8).astype(np.float64)
    row, unit = np.arange(len(stored))[:, None], np.arange(8)[None, :]
    return stored[row, unit ^ row % 8].reshape(-1, 64)


def _of_warpgroup(A: np.ndarray, *Bs: np.ndarray) -> Expected:
    """The products of A with each, as the accumulators of the threads."""

    def registers(x: np.ndarray) -> np.ndarray:
        thread, i = np.arange(128)[:, None], np.arange(x.shape[1] // 2)
        rows = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
        return x[rows, i // 4 * 8 + thread % 4 * 2 + i % 2]

    D = np.concatenate([registers(A @ B) for B in Bs], 1)
    return Expected(D.astype(np.float32), np.concatenate([registers(_rounding(A, B)) for B in Bs], 1))


def _semaphore(probe: Probe) -> Expected:
    words, counts = [probe.inputs], [np.uint32(3 * probe.blocks)]
    for _ in range(probe.blocks):
        words.append(words[-1] * np.uint32(3) + np.uint32(1))
    return Expected(np.concatenate([counts, *words[1:]]).astype(np.uint32))


def _shuffle(probe: Probe) -> Expected:
    x, y, z, w = np.moveaxis(_lanes(probe), 2, 0)  # (block, lane) each
    out = np.empty((probe.blocks, 32, 4, 4), np.uint32)
    out[:, :, 0] = np.stack([x[:, LANE ^ 1], x[:, LANE ^ 2], y[:, LANE ^ 16], y[:, LANE ^ 31]], 2)
    anywhere = np.broadcast_to(w[:, 5:6], w.shape)
    out[:, :, 1] = np.stack([z[:, LANE ^ 4], z[:, LANE ^ 8], anywhere, w[:, (LANE * 7 + 3) % 32]], 2)
    some = [(x % 16 == 0).any(1), (x % 64 == 0).any(1), np.zeros(len(x)), np.ones(len(x))]
    most = [x.max(1), (y % 1000).max(1), np.full(len(x), 31), np.full(len(x), 7)]
    out[:, :, 2] = np.stack(some, 1)[:, None]
    out[:, :, 3] = np.stack(most, 1)[:, None]
    return Expected(out)


def _elect(probe: Probe) -> Expected:
    return Expected(np.ones(probe.outputs, np.uint32))


def _barriers(probe: Probe) -> Expected:
    thread = np.arange(64)
    sums = probe.inputs[63 - thread] * np.where(thread < 32, 1, 4).astype(np.uint32)
    return Expected(sums[thread ^ 1])


def _mbarrier(probe: Probe) -> Expected:
    out = np.zeros(64, np.uint32)
    for round_ in range(4):
        out[32:] = out[32:] * np.uint32(3) + probe.inputs[round_ * 32 + (LANE ^ 5)]
    return Expected(out)


# ---- the copy engine


def box(tensor: np.ndarray, rows: int, first: tuple[int, int, int, int]) -> np.ndarray:
    """``rows`` × 64 elements of (batch, heads, rows, columns) from ``first`` = (column, row, head, batch) on;
    zeros outside."""
    out = np.zeros((rows, 64), tensor.dtype)
    column, row, head, batch = first
    if not (0 <= batch < tensor.shape[0] and 0 <= head < tensor.shape[1]):
        return out
    plane = tensor[batch, head]
    inside = [
        (max(at, 0), min(at + size, end))
        for at, size, end in ((row, rows, plane.shape[0]), (column, 64, plane.shape[1]))
    ]
    (r0, r1), (c0, c1) = inside
    if r0 < r1 and c0 < c1:
        out[r0 - row : r1 - row, c0 - column : c1 - column] = plane[r0:r1, c0:c1]
    return out


def _tma(probe: Probe) -> Expected:
    """Two boxes as they lie in shared memory: 16-byte unit u of row r at u ^ (r % 8)."""
    tensor, rows = probe.tensors[0]
    boxes = np.stack([box(tensor, rows, first) for first in ((0, 2, 1, 0), (64, 12, 0, 1))])
    units = boxes.view(np.uint32).reshape(2, rows, 8, 4)
    r = np.arange(rows)[:, None]
    return Expected(units[:, r, np.arange(8) ^ r % 8])


def _tma_boxes(probe: Probe) -> Expected:
    tensor, rows = probe.tensors[0]
    firsts = probe.inputs[1:].view(np.int32).reshape(-1, 4)
    return Expected(np.stack([box(tensor, rows, tuple(map(int, f))) for f in firsts]).view(np.uint32))


def _tma_store(probe: Probe) -> Expected:
    """What lies outside of the tensor is not written, what lies between the boxes stays zero."""
    assert probe.output_tensor is not None
    shape, rows = probe.output_tensor
    out = np.zeros(shape, np.uint16)
    for i, (column, row, head, batch) in enumerate(probe.inputs[1:].view(np.int32).reshape(-1, 4)):
        if not (0 <= batch < shape[0] and 0 <= head < shape[1]):
            continue
        words = np.arange(i * rows * 32, (i + 1) * rows * 32, dtype=np.uint32) + 1
        values = words.view(np.uint16).reshape(rows, 64)
        r, c = np.arange(rows)[:, None] + row, np.arange(64) + column
        inside = (r >= 0) & (r < shape[2]) & (c >= 0) & (c < shape[3])
        r, c = (np.broadcast_to(x, inside.shape)[inside] for x in (r, c))
        out[batch, head, r, c] = values[inside]
    return Expected(out.view(np.uint32))


# ---- tensor cores


def _rounding(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0, unit: float = 2.0**-20
) -> np.ndarray:
    """What a tensor core may lose: float32 sums that it cuts off instead of rounding. Of e4m3, each of 33 addends is
    cut off at 2^-13 of the largest (arXiv 2411.10958)."""
    return (np.abs(a) @ np.abs(b) + np.abs(c)) * unit


def _products(probe: Probe, kind: str) -> Expected:
    """By the fragment layouts of mma.cuh."""
    dtype = np.dtype(_KINDS[kind])
    words = probe.inputs.reshape(probe.blocks, 32, 10)
    ab, d = np.ascontiguousarray(words[:, :, :6]).view(dtype), words[:, :, 6:]
    if kind == "tf32":
        ab = (words[:, :, :6] & np.uint32(0xFFFFE000)).view(np.float32)
    per_word = 4 // dtype.itemsize
    ab = ab.reshape(probe.blocks, 32, 6, per_word).astype(np.float64)
    g, t = LANE // 4, LANE % 4
    depth = 8 * per_word
    A, B = np.zeros((probe.blocks, 16, depth)), np.zeros((probe.blocks, depth, 8))
    for e in range(per_word):
        k = t * per_word + e
        for i in range(4):
            A[:, g + 8 * (i % 2), k + depth // 2 * (i // 2)] = ab[:, :, i, e]
        for i in range(2):
            B[:, k + depth // 2 * i, g] = ab[:, :, 4 + i, e]
    C = np.zeros((probe.blocks, 16, 8))
    accumulators = np.ascontiguousarray(d).view(np.float32)
    at = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
    for i, (row, column) in enumerate(at):
        C[:, row, column] = accumulators[:, :, i]
    D, tolerance = A @ B + C, _rounding(A, B, C, 2.0**-9 if kind == "e4m3" else 2.0**-20)

    def fragments(x: np.ndarray) -> np.ndarray:
        return np.stack([x[:, row, column] for row, column in at], 2)

    return Expected(fragments(D).astype(np.float32), fragments(tolerance))


def _matrices(probe: Probe) -> list[np.ndarray]:
    return [x[0, 0].astype(np.float64) for x, _ in probe.tensors]


def _warpgroup_products(probe: Probe) -> Expected:
    """A B^T twice, then A V."""
    A, B, V = _matrices(probe)
    return _of_warpgroup(A, B.T, B.T, V)


def _tiles(probe: Probe) -> Expected:
    """Small integers: every partial sum is exact, so is every result."""
    A, B, V = _matrices(probe)
    scores = A @ B.T
    return Expected(np.stack([scores, scores, scores + A @ V]).astype(np.float32))


# ---- clusters


def _cluster(probe: Probe) -> Expected:
    """Of the mirrored thread: six words from the block before, six from the one before that."""
    sent = probe.inputs.reshape(-1, probe.cluster, probe.threads, 12)[:, :, ::-1]
    rank = np.broadcast_to(np.arange(probe.cluster, dtype=np.uint32)[:, None, None], (*sent.shape[:3], 1))
    received = [np.roll(sent[..., :6], 1, axis=1), np.roll(sent[..., 6:], 2, axis=1)]
    return Expected(np.concatenate([rank, *received], -1))


def _cluster_copy(probe: Probe) -> Expected:
    """Of the mirrored thread of the other block."""
    sent = probe.inputs.reshape(-1, probe.cluster, 2, probe.threads, 4)
    return Expected(sent[:, ::-1, :, ::-1])
