"""Cases of score functions that users write most, forward and backward, beside built-in options of the same meaning and
beside torch's FlexAttention, which is given the traced expression."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..gpu.architectures import Device
from ..problem.bits import Bits
from ..problem.mask import CAUSAL, Mask
from ..problem.problem import Problem
from ..problem.score_function import score
from ..problem.where import where
from .cases import Case, Contender, best, contenders, of_forward


def _relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, np.clip(j - i, -128, 127) + 128]


def _buckets(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """The buckets of T5: one per distance below 16 keys, then logarithmic up to 128 keys."""
    far = 16 + (np.log(np.maximum(i - j, 16) / 16) * (16 / np.log(8))).astype(int)
    return s + table[h, np.where(i - j < 16, np.maximum(i - j, 0), np.minimum(far, 31))]


def _alibi(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    return s - slopes[h] * np.abs(i - j)


def _softcap(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 30.0 * np.tanh(s / 30.0)


def _soft_documents(s: Any, b: Any, h: Any, i: Any, j: Any, ids: Any) -> Any:
    """Scores of keys in other documents are lowered by 4."""
    return np.where(ids[b, i] == ids[b, j], s, s - 4.0)


def forms(
    batch: int, heads: int, seqlen_k: int
) -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]:
    """By name: the function, its arrays, and built-in options with the same meaning."""
    return {
        "relative table": (_relative, {"table": np.empty((heads, 256), np.float32)}, {}),
        "T5 buckets": (_buckets, {"table": np.empty((heads, 32), np.float32)}, {}),
        "ALiBi": (_alibi, {"slopes": np.empty(heads, np.float32)}, {"alibi": True}),
        "soft cap": (_softcap, {}, {"softcap": 30.0}),
        "soft documents": (_soft_documents, {"ids": np.empty((batch, seqlen_k), np.int32)}, {}),
    }


def of_shape(shape: Problem, device: Device | None) -> Iterator[Case]:
    """Forward, backward, and the backward with gradients of arrays."""
    causal = dataclasses.replace(shape, mask=CAUSAL)
    for operation in (lambda p: p, of_forward):
        for name, (function, arrays, built_in) in forms(shape.batch, shape.heads, shape.seqlen_k).items():
            made = score(function, **arrays)
            problem = operation(dataclasses.replace(causal, score=made.change()))
            found = [*contenders(*best(problem, device), "flex", "flex flash")]
            if built_in:
                other = operation(dataclasses.replace(causal, **built_in))
                found += [Contender(x, name=f"{x} built in", problem=other) for x in best(other, device)]
            with_gradients = tuple(n for n, x in arrays.items() if x.dtype.kind == "f")
            if problem.operation == "backward" and with_gradients:
                full = dataclasses.replace(problem, score=made.change(with_gradients))
                found += [Contender(x, name=f"{x} with gradients", problem=full) for x in best(full, device)]
            yield Case(problem, tuple(found), f"{name}, {problem.operation}")


@functools.cache
def _bits(seqlen: int) -> dict[str, Mask]:
    """Masks with one bit for each score."""
    side, rng = math.isqrt(seqlen), np.random.default_rng(0)
    near = where(lambda b, h, i, j: (abs(i // side - j // side) <= 8) & (abs(i % side - j % side) <= 8), {})
    tiles = -(-seqlen // 128)
    visited = rng.random((tiles, tiles)) < 0.5
    visited[np.diag_indices(tiles)] = True
    scores = rng.random((seqlen, seqlen), np.float32) < 0.5
    seen = scores & visited.repeat(128, 0).repeat(128, 1)[:seqlen, :seqlen]
    return {
        "2-D neighbourhood": near.bound(1, 1, 1, seqlen, seqlen), "random bits": Bits.of(seen[None, None]),
    }  # fmt: skip


def of_masks(shape: Problem, device: Device | None) -> Iterator[Case]:
    """Tokens that see tokens at most 8 rows and columns away; and half of the scores of half of the tiles."""
    for operation in (lambda p: p, of_forward):
        for name, mask in _bits(shape.seqlen_k).items():
            problem = operation(dataclasses.replace(shape, mask=mask))
            found = contenders(*best(problem, device), "flex", "flex flash")
            yield Case(problem, found, f"{name}, {problem.operation}")
