"""FlashAttention-4, the CuTe kernels of flash-attn-4: the fastest open peer on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem.problem import Problem
from . import tensors


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tensors.Runs:
    """The call on copies in the library's layout, (batch, seqlen, heads, head_dim). Copying is not timed."""
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
    """The mask as numbers of keys to the left and right of the bottom-right diagonal. Raises NotImplementedError if a
    number would be negative: the library gives negative numbers another meaning."""
    first, last = problem.edges
    diagonal = problem.seqlen_k - problem.seqlen_q
    left = None if first is None else diagonal - first
    right = None if last is None else last - diagonal
    if min(left or 0, right or 0) < 0:
        raise NotImplementedError("takes no window without the bottom-right diagonal")
    return left, right
