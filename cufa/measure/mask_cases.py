"""Cases of masks: one shape under every mask, forward and backward, beside libraries that have the mask. torch's
FlexAttention has all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from .. import masks
from ..gpu.architectures import Device
from ..problem.lengths import Packed
from ..problem.mask import CAUSAL, FULL, Mask
from ..problem.problem import Problem
from .cases import Case, Contender, best, contenders, of_forward

_PEERS = ("flex", "flex flash", "fa4", "torch flash", "torch cudnn")

WINDOW = masks.window(1023, 0)

#: Lengths of the documents in one sequence of 8192 tokens.
DOCUMENTS = (700, 1500, 300, 2100, 1024, 900, 168, 1500)
_QUESTION, _ANSWERS = 2000, (900, 1500, 700, 1200, 1092, 800)


def bands(shape: Problem, device: Device | None) -> Iterator[Case]:
    """The gain of skipped tiles, and the cost of a soft cap."""
    for mask, softcap in ((FULL, None), (CAUSAL, None), (WINDOW, None), (CAUSAL, 30.0)):
        problem = dataclasses.replace(shape, mask=mask, softcap=softcap)
        yield Case(problem, contenders(*best(problem, device), *_PEERS))


def irregular(shape: Problem, device: Device | None) -> Iterator[Case]:
    """Masks that are no bands, forward and backward; also the backward without a mask, the base of comparisons."""
    for operation in (lambda p: p, of_forward):
        yield _documents(operation(shape), device)
        for name, mask in {"no mask": FULL, **irregular_masks(shape.seqlen_k)}.items():
            problem = operation(dataclasses.replace(shape, mask=mask))
            if problem.operation == "backward" or mask not in (FULL, WINDOW):  # bands() has these forwards
                yield Case(
                    problem,
                    contenders(*best(problem, device), "flex", "flex flash"),
                    f"{name}, {problem.operation}",
                )


def irregular_masks(seqlen: int) -> dict[str, Mask]:
    """Irregular masks, a prefix and a window by name, for equal numbers of queries and keys."""
    rows = np.arange(seqlen) + np.random.default_rng(0).integers(1, seqlen, seqlen)
    half = seqlen // 2
    first = np.arange(seqlen, dtype=np.int32) % half
    return {
        "half of all scores": masks.columns(first, first + half),
        "prefix of 2048": masks.prefix(2048),
        "window of 1024": WINDOW,
        "random eviction": masks.evict(np.minimum(rows, seqlen).astype(np.int32)),
        "shared question": masks.shared_question(_QUESTION, _ANSWERS, seqlen=seqlen),
    }


def _documents(shape: Problem, device: Device | None) -> Case:
    """Documents in two forms: one sequence under a mask of columns, and packed sequences."""
    problem = dataclasses.replace(shape, mask=masks.documents(DOCUMENTS, seqlen=shape.seqlen_k))
    lengths = DOCUMENTS * shape.batch
    tokens = shape.batch * shape.seqlen_k
    packed = dataclasses.replace(
        shape, batch=len(lengths), seqlen_q=max(lengths), seqlen_k=max(lengths), mask=CAUSAL,
        lengths=Packed(tokens, tokens, lengths, lengths),
    )  # fmt: skip
    as_packed = (Contender(name, name=f"{name} packed", problem=packed) for name in best(packed, device))
    found = (*contenders(*best(problem, device)), *as_packed, *contenders("flex", "flex flash"))
    return Case(problem, found, f"causal documents, {problem.operation}")
