"""The mask of an array of booleans, in the cheapest form that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .bits import Bits
from .checks import is_device_array
from .columns import columns_of
from .mask import Band, Mask
from .where import where_booleans


def mask_of_booleans(seen: Any, name: str, spreads: bool = False) -> Mask:
    """A band, columns or bits under which query i sees key j where ``seen[..., i, j]`` is True.

    ``seen`` is (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k); ``spreads``:
    axes of size 1 stand for any size. If it is on a GPU, nothing is read from there. Raises TypeError or ValueError
    naming the argument.
    """
    if seen.dtype != bool:
        raise TypeError(f"{name} is {seen.dtype}: it takes booleans, True where a query sees a key")
    if seen.ndim not in (2, 3, 4):
        raise ValueError(
            f"{name} has shape {seen.shape}: it takes 2 to 4 axes, ([batch, [kv_heads,]] seqlen_q, seqlen_k)"
        )
    x = seen[None, None] if seen.ndim == 2 else seen[:, None] if seen.ndim == 3 else seen
    if is_device_array(x) or (spreads and 1 in x.shape[2:]):
        return where_booleans(x)
    band = _narrowest_band(x)
    seqlen_q, seqlen_k = x.shape[-2:]
    band_matrix = band.dense(seqlen_q, seqlen_k)
    if (x == band_matrix).all():
        return band
    runs = None if spreads and x.shape[1] > 1 else _hidden_runs(x, band_matrix)
    if runs is None:  # or heads may be query heads, which only bits take
        return Bits.of(x)
    if not (runs[2] < runs[3]).any():
        runs = runs[:2]
    return columns_of(band, list(runs), "top-left", f"{band}, columns of {seqlen_k:,} keys", np)


def _narrowest_band(x: Any) -> Band:
    seqlen_q, seqlen_k = x.shape[-2:]
    row, key = np.nonzero(x.any(axis=(0, 1)))
    if not len(row):
        return Band(diagonal=_diagonal(seqlen_k - seqlen_q), matrix=(seqlen_q, seqlen_k))
    first, last, shift = int((key - row).min()), int((key - row).max()), seqlen_k - seqlen_q
    bounded = first > 1 - seqlen_q, last < seqlen_k - 1
    if not first <= shift <= last:
        shift = last
    left, right = (
        n if is_bound else None for n, is_bound in zip((shift - first, last - shift), bounded, strict=True)
    )
    return Band(left, right, _diagonal(shift), matrix=(seqlen_q, seqlen_k))


def _diagonal(shift: int) -> str | int:
    return shift or "top-left"


def _hidden_runs(x: Any, band_matrix: Any) -> Any:
    """(lo1, hi1, lo2, hi2), each (batch, heads, seqlen_k), of the scores that are hidden within the band; None if a key
    is hidden from more than two runs."""
    hidden = (band_matrix & ~x).astype(np.int8)
    edges = np.diff(hidden, axis=-2, prepend=np.int8(0), append=np.int8(0))
    count = (edges == 1).sum(axis=-2)
    if (count > 2).any():
        return None
    first = np.argmax(edges == 1, axis=-2), np.argmax(edges == -1, axis=-2)
    rows = x.shape[-2] - np.argmax(edges[..., ::-1, :] == 1, axis=-2)
    second = rows, x.shape[-2] - np.argmax(edges[..., ::-1, :] == -1, axis=-2)
    nothing = np.zeros_like(first[0])
    return np.stack(
        [
            *(np.where(count >= 1, edge, nothing) for edge in first),
            *(np.where(count == 2, edge, nothing) for edge in second),
        ]
    )
