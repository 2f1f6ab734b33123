"""Quantisation to e4m3 in NumPy. Arrays are (batch, heads, seqlen, head_dim); packed sequences have batch 1."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...problem.float8 import KEY_GROUP, KEY_ORDER, KEY_PADDING, LARGEST, first_block, per_token
from ...problem.lengths import Lengths, Packed, Place

Array = npt.NDArray[Any]

_SMALLEST = np.float32(2.0**-126)


def places_of(lengths: Lengths) -> list[Place]:
    return lengths.places() or [(0, slice(None), slice(None), slice(None))]


def quantize(
    x: Array,
    out: Array,
    scale: Array,
    lengths: Lengths,
    mode: str,
    block: int,
    signs: Array | None,
    smooth: bool,
    transpose: bool,
) -> None:
    """Writes e4m3 of x to ``out`` (bytes, zeros in the padding; ``transpose``: as :func:`transposed` does), and
    ``scale``, of the shape that :func:`~cufa.problem.float8.scale_shape` returns. Raises ValueError for numbers that
    are not finite."""
    if transpose:
        rows = np.empty(x.shape, np.uint8)
        quantize(x, rows, scale, lengths, mode, block, signs, smooth, transpose=False)
        transposed(rows, out, lengths)
        return
    out[...] = 0
    scale[...] = 1
    places = places_of(lengths)
    if mode == "tensor":
        largest = max(
            (_amax(_smoothed(x, place, smooth), signs).max(initial=0) for place in places), default=0
        )
        scale[...] = scale_of(np.array(largest, np.float32))
    for place in places:
        y = _smoothed(x, place, smooth)
        if not y.shape[2]:
            continue
        own = scale if mode == "tensor" else _scale_of(place, _amax(y, signs), scale, lengths, mode, block)
        inverse = np.float32(1) / per_token(own, mode, block, y.shape[2])[..., None]
        if signs is not None:
            rotated(y, signs)
            inverse *= _root(y.shape[-1])
        y *= inverse
        np.clip(y, -LARGEST, LARGEST, out=y)
        out[place[1], :, place[3]] = y.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _scale_of(place: Place, amax: Array, scale: Array, lengths: Lengths, mode: str, block: int) -> Array:
    """The scales of some sequences from the largest magnitude of each token, also written to ``scale``."""
    sequence, batch, _, rows = place
    if mode == "token":
        own = scale[batch, :, rows] = scale_of(amax)
    elif mode == "head":
        own = scale[sequence : sequence + len(amax)] = scale_of(amax.max(axis=-1))
    else:
        own = scale_of(np.maximum.reduceat(amax, np.arange(0, amax.shape[-1], block), axis=-1))
        start = first_block(rows.start, block, sequence) if isinstance(lengths, Packed) else 0
        scale[batch, :, start : start + own.shape[-1]] = own
    return own


def scale_of(amax: Array) -> Array:
    """amax / 448, a normal number; 1 where everything is 0."""
    scale: Array = np.where(amax > 0, np.maximum(amax / np.float32(LARGEST), _SMALLEST), np.float32(1))
    return scale


def _amax(y: Array, signs: Array | None) -> Array:
    """The largest magnitude of each token. If it will be rotated: a bound, ``sum |y| / √n`` of the columns that are
    rotated together, added pair by pair."""
    amax: Array = np.abs(y)
    if signs is not None:
        for _ in range(_rotated_columns(y.shape[-1]).bit_length() - 1):
            amax = amax[..., ::2] + amax[..., 1::2]
        amax *= _root(y.shape[-1])
    amax = amax.max(axis=-1)
    if not np.isfinite(amax).all():
        b, head, token = np.argwhere(~np.isfinite(amax))[0].tolist()
        raise ValueError(
            f"x has a number that is inf or NaN: sequence {b}, head {head}, token {token}; e4m3 takes finite numbers"
        )
    return amax


def _smoothed(x: Array, place: Place, smooth: bool) -> Array:
    """The tokens of some sequences in float32."""
    _, batch, _, rows = place
    y: Array = x[batch, :, rows].astype(np.float32)
    if smooth and y.shape[2]:
        y -= y.mean(axis=2, keepdims=True, dtype=np.float64).astype(np.float32)
    return y


def widened(x: Array, scale: Array, mode: str, block: int, dtype: Any) -> Array:
    """``scale · x`` of e4m3 rows (batch, heads, seqlen, head_dim), multiplied in float32 and rounded to ``dtype``."""
    wide = x.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wide *= per_token(scale, mode, block, x.shape[2])[..., None]
    with np.errstate(over="ignore"):
        rounded: Array = wide.astype(dtype)
    return rounded


def rotated(y: Array, signs: Array) -> Array:
    """y times diag(signs) H in place, for each n columns; H is the Hadamard matrix of n columns."""
    head_dim = y.shape[-1]
    size = _rotated_columns(head_dim)
    y *= signs
    distance = 1
    while distance < size:
        pairs = y.reshape(*y.shape[:-1], head_dim // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        pairs[..., 0, :], pairs[..., 1, :] = low, high
        distance *= 2
    return y


def _rotated_columns(head_dim: int) -> int:
    """Columns that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def _root(head_dim: int) -> Any:
    return np.float32(_rotated_columns(head_dim) ** -0.5)


def transposed(x: Array, out: Array, lengths: Lengths) -> None:
    """Bytes (batch, heads, keys, head_dim) to (batch, heads, head_dim, padded keys), in the order
    :data:`~cufa.problem.float8.KEY_ORDER` of each 32 keys of a sequence; zeros in the padding."""
    out[...] = 0
    for place in places_of(lengths):
        _, batch, _, rows = place
        own = x[batch, :, rows]
        count, heads, keys, head_dim = own.shape
        groups = -(-keys // KEY_GROUP)
        padded = np.zeros((count, heads, groups, KEY_GROUP, head_dim), np.uint8)
        padded.reshape(count, heads, groups * KEY_GROUP, head_dim)[:, :, :keys] = own
        in_order = padded[:, :, :, KEY_ORDER].reshape(count, heads, groups * KEY_GROUP, head_dim)
        start = _first_position(place, lengths)
        out[batch, :, :, start : start + groups * KEY_GROUP] = in_order.swapaxes(2, 3)


def rows_of(data: Array, out: Array, lengths: Lengths) -> None:
    """The inverse of :func:`transposed`: writes bytes (batch, heads, keys, head_dim)."""
    groups = data.reshape(*data.shape[:3], data.shape[3] // KEY_GROUP, KEY_GROUP)
    in_order = groups[..., np.argsort(KEY_ORDER)].reshape(data.shape).swapaxes(2, 3)
    out[...] = 0
    for place in places_of(lengths):
        _, batch, _, rows = place
        start = _first_position(place, lengths)
        out[batch, :, rows] = in_order[batch, :, start : start + out[batch, :, rows].shape[2]]


def _first_position(place: Place, lengths: Lengths) -> int:
    """Where the keys of a sequence begin in a row of transposed values."""
    sequence, _, _, rows = place
    return KEY_PADDING * first_block(rows.start, KEY_PADDING, sequence) if isinstance(lengths, Packed) else 0
