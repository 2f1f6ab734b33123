"""Dropout: which weights of attention are kept, by position alone.

Two calls of Philox4x32-7 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011: seven
rounds pass BigCrush) give one random byte for each of 32 scores; a weight is dropped if its byte is less than 256 times
the probability. The device side is cuda_src/shared/dropout.cuh, which also says why 32 scores lie as they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .checks import as_array, check_number, is_device_array, shown

Bools = npt.NDArray[np.bool_]

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of one call, with its seed read."""

    dropped: int
    """Dropped weights per 256, on average."""
    seed: int
    number: int
    """The low 32 bits of the seed array's second number; 0 for an int."""
    heads: int
    """Query heads of a sequence."""
    sequence: int = 0
    """Number of the first sequence, when the reference computes packed sequences one by one."""

    def kept(self, sequence: Any, head: Any, rows: range, columns: range) -> Bools:
        """Whether each weight is kept, (..., rows, columns). ``sequence`` and ``head`` are integers, or arrays that
        broadcast."""
        head_index = (np.asarray(sequence, np.uint64) + np.uint64(self.sequence)) * np.uint64(
            self.heads
        ) + np.asarray(head, np.uint64)
        queries, keys = (
            np.arange(x.start // 16 * calls, -(-x.stop // 16) * calls, dtype=np.uint64)
            for x, calls in ((rows, 8), (columns, 2))
        )
        counters = np.broadcast_arrays(
            head_index[..., None, None] & _LOW, keys, np.uint64(self.number) & _LOW, queries[:, None]
        )
        found = _philox(counters, (self.seed & 0xFFFFFFFF, self.seed >> 32))
        outer, blocks = found.shape[:-3], (len(queries) // 8, len(keys) // 2)
        words = found.reshape(
            *outer, 4 * blocks[0], 2, 2 * blocks[1], 4
        )  # calls n and n + 1 serve a group of scores
        kept = np.full((*outer, 4 * blocks[0], 2 * blocks[1]), _LOW, "<u4")
        for k in range(8):  # bit k of 32 bytes; a higher bit decides before lower ones
            word = words[..., k // 4, :, k % 4]
            kept = kept & word if self.dropped >> k & 1 else kept | word
        bits = np.unpackbits(kept[..., None].view(np.uint8), axis=-1, bitorder="little")
        # Bits of a group: key 2 further on, query 1, key 1, key 8, query 8.
        bits = bits.reshape(*outer, blocks[0], 4, blocks[1], 2, 2, 2, 2, 2, 2)
        n = len(outer)
        order = [*range(n), *(n + x for x in (0, 8, 1, 5, 2, 7, 3, 4, 6))]
        whole = bits.transpose(order).reshape(*outer, 16 * blocks[0], 16 * blocks[1]).view(np.bool_)
        first_row, first_column = rows.start % 16, columns.start % 16
        return whole[..., first_row : first_row + len(rows), first_column : first_column + len(columns)]

    @property
    def factor(self) -> float:
        """The factor of a kept weight."""
        return kept_factor(self.dropped)


def kept_factor(dropped: int) -> float:
    return 256 / (256 - dropped)


def _philox(counters: Sequence[npt.NDArray[np.uint64]], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Four words for each counter of four words, (..., 4)."""
    x = list(counters)
    for n in range(_ROUNDS):
        low, high = (np.uint64((k + n * step) & 0xFFFFFFFF) for k, step in zip(key, _INCREMENTS, strict=True))
        first, second = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        x = [
            (second >> np.uint64(32)) ^ x[1] ^ low,
            second & _LOW,
            (first >> np.uint64(32)) ^ x[3] ^ high,
            first & _LOW,
        ]
    return np.stack(x, axis=-1).astype("<u4")


def check_dropout(dropout: Any) -> int:
    """Dropped weights per 256; 0 for None. Raises TypeError or ValueError."""
    if dropout is None:
        return 0
    value = check_number("dropout", dropout, "a number from 0 to below 1, or None")
    if not 0 <= value < 1:
        raise ValueError(f"dropout={dropout!r} must be from 0 to below 1: pass None for no dropout")
    return 0 if value == 0 else min(max(round(256 * value), 1), 255)


def resolve_dropout(dropout: Any, seed: Any) -> tuple[int, Any]:
    """(dropped weights per 256, the seed as an array of two 64-bit integers or None without dropout). Raises TypeError
    or ValueError, naming the argument."""
    dropped = check_dropout(dropout)
    if dropout is None and seed is not None:
        raise ValueError("seed= is given, but dropout is None: pass dropout=, such as 0.1, or leave seed out")
    if dropped and seed is None:
        raise ValueError(
            f"dropout={dropout!r} needs seed=, an int, or two integers (seed, number) on the GPU; the backward takes "
            "the same"
        )
    return dropped, None if seed is None or not dropped else read_seed(seed)


def read_seed(seed: Any) -> Any:
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} must be from 0 to 2**64 - 1: pass seed % 2**64")
        return np.array([seed, 0], np.uint64)
    if isinstance(seed, (bool, float, str, bytes)):
        raise TypeError(f"seed must be an int, or an array of two 64-bit integers, not {shown(seed)}")
    if isinstance(seed, (list, tuple)):
        natural = all(isinstance(x, (int, np.integer)) and 0 <= x < 2**64 for x in seed)
        found = np.asarray(
            seed, np.uint64 if natural else None
        )  # None: 2**63 beside a small int is a float64
    else:
        found = as_array("seed", seed)
    if found.dtype == np.uint32 and found.shape == (4,):  # JAX has no 64-bit integers by default
        found = found.view(np.uint64)
    if found.dtype.kind not in "iu" or found.dtype.itemsize != 8:
        raise TypeError(f"seed is {found.dtype}: it takes an int, or an array of two 64-bit integers")
    if found.shape != (2,):
        raise ValueError(f"seed has shape {found.shape}: an array holds a seed and a number, (2,)")
    if is_device_array(found):
        if not found.flags.c_contiguous:
            raise ValueError(f"seed has strides {found.strides}: it must be contiguous")
        return found
    return np.ascontiguousarray(found).view(np.uint64)


def dropout_of(dropped: int, seed: Any, heads: int, sequence: int = 0) -> Dropout | None:
    """The dropout of a call, or None without dropout. A seed on a GPU is copied to the host."""
    if not dropped:
        return None
    on_host = seed.get() if is_device_array(seed) else np.asarray(seed)
    key, number = on_host.view(np.uint64)
    return Dropout(dropped, int(key), int(number) & 0xFFFFFFFF, heads, sequence)


def dropout_mask(shape: Sequence[int], dropout: float, *, seed: Any) -> Bools:
    """Which weights attention with ``dropout=`` and ``seed=`` keeps.

    Parameters
    ----------
    shape : (batch, heads, seqlen_q, seqlen_k)
        batch counts sequences, heads query heads. In a padded or packed call, a sequence with m queries and n keys has
        the first m rows and n columns of its entry.
    dropout : float
        As for :func:`cufa.flash_attention`: from 0 to below 1, rounded to a multiple of 1/256.
    seed : int, or array of two 64-bit integers
        As for :func:`cufa.flash_attention`; an array on a GPU is copied to the host.

    Returns
    -------
    array of bool, ``shape``
        True where a weight is kept, and multiplied by 1 / (1 - dropout).

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    shape = tuple(shape)
    if len(shape) != 4 or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
        raise ValueError(f"shape={shape!r} must be (batch, heads, seqlen_q, seqlen_k)")
    batch, heads, seqlen_q, seqlen_k = map(int, shape)
    random = dropout_of(*resolve_dropout(dropout, seed), heads)
    kept = np.ones(shape, np.bool_)
    if random is not None and kept.size:
        for b, h in np.ndindex(batch, heads):
            kept[b, h] = random.kept(b, h, range(seqlen_q), range(seqlen_k))
    return kept
