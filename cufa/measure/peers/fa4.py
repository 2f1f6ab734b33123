"""FlashAttention-4, the CuTe kernels of flash-attn-4: the fastest open peer on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem.problem import Problem
from . import tensors


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tensors.Runs:
    """On copies in the peer's own layout, (batch, seqlen, heads, head_dim), made beforehand."""
    options: dict[str, Any] = {"softmax_scale": problem.scale, "window_size": window_size(problem)}
    if problem.softcap is not None:
        options["softcap"] = problem.softcap
    if problem.deterministic:
        options["deterministic"] = True
    from flash_attn.cute import flash_attn_func

    def attention(q: Any, k: Any, v: Any) -> Any:
        found = flash_attn_func(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found  # versions differ in what they return

    return tensors.runs(attention, arrays, lambda x: x.transpose(1, 2).contiguous())


def window_size(problem: Problem) -> tuple[int | None, int | None]:
    """The mask as keys to the left and right of the diagonal, which ends bottom right. Raises
    NotImplementedError where a side would be negative: the library takes that for something else."""
    first, last = problem.edges
    diagonal = problem.seqlen_k - problem.seqlen_q
    left = None if first is None else diagonal - first
    right = None if last is None else last - diagonal
    if min(left or 0, right or 0) < 0:
        raise NotImplementedError("takes no window that leaves out the diagonal, bottom right")
    return left, right
