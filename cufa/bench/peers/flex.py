"""torch's FlexAttention, compiled, with its block mask made beforehand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...core.problem import Problem
from . import tensors


def missing() -> str:
    return tensors.missing("torch")


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tensors.Runs:
    if problem.deterministic:
        raise NotImplementedError(tensors.NOT_DETERMINISTIC)
    return tensors.runs(_compiled(problem), arrays)


@functools.lru_cache(1)  # the sets of inputs of one problem share it
def _compiled(problem: Problem) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Past a handful of shapes torch stops compiling and falls back to a slow path, without a word.
    torch._dynamo.reset()
    # The backward is run more than once on what the forward kept for it.
    torch._functorch.config.donated_buffer = False
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
    block_mask = None
    if problem.edges != (None, None):
        lengths = problem.seqlen_q, problem.seqlen_k
        block_mask = create_block_mask(_visible(problem), None, None, *lengths, device="cuda")
    options: dict[str, Any] = {"block_mask": block_mask, "scale": problem.scale}
    if problem.softcap is not None:
        options["score_mod"] = _capped(problem.softcap)
    if problem.group_size > 1:
        options["enable_gqa"] = True
    return functools.partial(torch.compile(flex_attention, dynamic=False), **options)


def _visible(problem: Problem) -> Callable[..., Any]:
    first, last = problem.edges
    if first is None:
        return lambda batch, head, query, key: key <= query + last
    if last is None:
        return lambda batch, head, query, key: key >= query + first
    return lambda batch, head, query, key: (key >= query + first) & (key <= query + last)


def _capped(cap: float) -> Callable[..., Any]:
    import torch

    return lambda score, batch, head, query, key: cap * torch.tanh(score / cap)
