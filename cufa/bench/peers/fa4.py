"""FlashAttention-4, the CuTe kernels of flash-attn-4: the fastest open peer on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.problem import Problem
from . import tensors


def missing() -> str:
    return tensors.missing("torch") or tensors.missing("flash_attn.cute", "flash-attn-4")


def make(name: str, problem: Problem, q: Any, k: Any, v: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """On copies in the peer's own layout, (batch, seqlen, heads, head_dim), made beforehand."""
    options: dict[str, Any] = {"softmax_scale": problem.scale, "window_size": window_size(problem)}
    if problem.softcap is not None:
        options["softcap"] = problem.softcap
    from flash_attn.cute import flash_attn_func

    arguments = [tensors.to_torch(x).transpose(1, 2).contiguous() for x in (q, k, v)]

    def call() -> Any:
        found = flash_attn_func(*arguments, **options)
        return found[0] if isinstance(found, tuple) else found  # versions differ in what they return

    run = tensors.tried(tensors.on_cupys_stream(call))
    return run, lambda: tensors.to_cupy(run().transpose(1, 2), q.dtype)


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
