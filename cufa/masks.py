"""Masks for :func:`cufa.flash_attention`: which keys each query sees.

A mask is a small value without arrays: it knows no lengths, can be compared, printed and kept, and one mask
serves every call.

>>> import cufa
>>> str(cufa.masks.window(1023, 0))
'window (1023, 0)'
>>> cufa.masks.causal().dense(2, 3).astype(int)
array([[1, 1, 0],
       [1, 1, 1]])
"""

from __future__ import annotations

import operator
from typing import Any

from .core.mask import CAUSAL, DIAGONALS, FULL, Band, Mask
from .core.problem import MAX_SIZE

__all__ = ["Mask", "causal", "full", "window"]


def full() -> Mask:
    """Every query sees every key."""
    return FULL


def causal(diagonal: str | int = "bottom-right") -> Mask:
    """Query i sees keys up to ``i + δ``.

    δ is ``seqlen_k - seqlen_q`` for ``"bottom-right"`` (the last query sees the last key, as decoding with a
    cache needs), 0 for ``"top-left"`` (PyTorch's ``is_causal``), or the number given: the position of the
    first query among the keys, as chunked prefill and rings need it.

    Raises TypeError or ValueError for another diagonal.
    """
    diagonal = _check_diagonal(diagonal)
    return CAUSAL if diagonal == "bottom-right" else Band(right=0, diagonal=diagonal)


def window(left: int | None, right: int | None, diagonal: str | int = "bottom-right") -> Mask:
    """Query i sees keys ``i + δ - left`` to ``i + δ + right``, both included: up to ``left + right + 1`` of them.

    None is unbounded. δ as for :func:`causal`. ``window(1023, 0)`` is the causal window of 1,024 keys that
    FlashAttention writes (1023, 0); cuDNN and FlashMask count 1024 there.

    Raises TypeError or ValueError, naming the argument, for anything but integers from 0 up and None.
    """
    left, right = check_window((left, right))
    return Band(left, right, _check_diagonal(diagonal))


def check_window(value: Any, name: str = "window") -> tuple[int | None, int | None]:
    """``value`` as (left, right), or an error that names the argument."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name}={value!r}: it is a pair (left, right) of integers from 0 up, or None each, such as (1023, 0)"
        )
    return _check_side(name, "left", value, value[0]), _check_side(name, "right", value, value[1])


def _check_side(name: str, side: str, value: Any, size: Any) -> int | None:
    if size is None:
        return None
    try:
        if isinstance(size, bool):
            raise TypeError
        size = operator.index(size)
    except TypeError:
        raise TypeError(
            f"{name}={value!r}: {side} must be an integer from 0 up, or None for no bound, not {size!r}"
        ) from None
    if size > MAX_SIZE:
        raise ValueError(f"{name}={value!r}: {side} is at most {MAX_SIZE:,}; for no bound pass None")
    if size < 0:
        raise ValueError(
            f"{name}={value!r}: {side} must be at least 0 (0: up to the query's own position); "
            "for no bound pass None"
        )
    return int(size)


def _check_diagonal(diagonal: Any) -> str | int:
    if isinstance(diagonal, str):
        if diagonal in DIAGONALS:
            return diagonal
        raise ValueError(f"diagonal={diagonal!r} is not known; use 'bottom-right', 'top-left' or an integer")
    try:
        if isinstance(diagonal, bool):
            raise TypeError
        diagonal = operator.index(diagonal)
    except TypeError:
        raise TypeError(f"diagonal={diagonal!r} must be 'bottom-right', 'top-left' or an integer") from None
    if abs(diagonal) > MAX_SIZE:
        raise ValueError(f"diagonal={diagonal!r} must be within ±{MAX_SIZE:,}, the longest sequences")
    return int(diagonal)
