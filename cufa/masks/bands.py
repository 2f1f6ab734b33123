"""Masks that are bands around a diagonal, with or without exempt tokens. They fit any lengths."""

from __future__ import annotations

from typing import Any

from ..problem.checks import check_count, check_counts, check_diagonal, check_window
from ..problem.mask import CAUSAL, FULL, Band, Mask
from ..problem.mask_family import as_typed


@as_typed
def full() -> Mask:
    """Every query sees every key."""
    return FULL


@as_typed
def causal(diagonal: str | int = "bottom-right") -> Mask:
    """Query i sees keys up to ``i + δ``.

    δ is ``seqlen_k - seqlen_q`` for ``"bottom-right"`` (the last query sees the last key, as decoding with a
    cache needs), 0 for ``"top-left"`` (PyTorch's ``is_causal``), or the number given: the position of the
    first query among the keys, from -2**30 to 2**30, as chunked prefill and rings need it.

    Raises TypeError or ValueError for another diagonal.
    """
    diagonal = check_diagonal(diagonal)
    return CAUSAL if diagonal == "bottom-right" else Band(right=0, diagonal=diagonal)


@as_typed
def window(left: int | None, right: int | None, diagonal: str | int = "bottom-right") -> Mask:
    """Query i sees keys ``i + δ - left`` to ``i + δ + right``, both included: up to ``left + right + 1`` of them.

    None is unbounded. δ as for :func:`causal`. ``window(1023, 0)`` is the causal window of 1,024 keys that
    FlashAttention writes (1023, 0); cuDNN and FlashMask call it a window of 1024.

    Raises TypeError or ValueError, naming the argument, for anything but integers from 0 up and None.
    """
    left, right = check_window((left, right))
    return Band(left, right, check_diagonal(diagonal))


@as_typed
def prefix(length: Any, diagonal: str | int = "bottom-right") -> Mask:
    """Causal, and every query sees the first ``length`` keys (prefix-LM).

    ``length`` is an integer from 0 up, or an array with an integer per sequence, NumPy or int32 on the GPU. An array on
    the GPU is read by every call and replay of a graph: its owner may change it. δ as for :func:`causal`.

    Raises TypeError or ValueError naming the argument.

    >>> import cufa
    >>> cufa.masks.prefix(2).dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return Band(right=0, diagonal=check_diagonal(diagonal), prefix=check_counts("length", length))


@as_typed
def streaming(keep: Any, window: int, diagonal: str | int = "bottom-right") -> Mask:
    """Causal; query i sees the first ``keep`` keys and the ``window`` keys before its own, and its own
    (StreamingLLM's attention sinks).

    ``keep`` is an integer from 0 up, or an array with an integer per sequence, read as that of :func:`prefix`. δ as for
    :func:`causal`.

    Raises TypeError or ValueError naming the argument.
    """
    left = check_count("window", window)
    return Band(left, 0, check_diagonal(diagonal), keep=check_counts("keep", keep))


@as_typed
def global_window(
    tokens: Any, left: int | None, right: int | None, diagonal: str | int = "bottom-right"
) -> Mask:
    """A :func:`window` in which the first ``tokens`` tokens see every key, and every query sees them (Longformer).

    ``tokens`` is an integer from 0 up, or an array with an integer per sequence, read as that of :func:`prefix`. Query
    i is global if ``i + δ < tokens``, δ as for :func:`causal`.

    Raises TypeError or ValueError naming the argument.
    """
    left, right = check_window((left, right))
    count = check_counts("tokens", tokens)
    return Band(left, right, check_diagonal(diagonal), prefix=count, global_tokens=count)
