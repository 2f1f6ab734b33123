"""Values of the mask editor's fields for a mask, for links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cufa import masks
from cufa.dashboard.link import NONE
from cufa.dashboard.model import mask_texts
from cufa.problem.columns import Chunks, Columns
from cufa.problem.mask import DIAGONALS, Band, Mask
from cufa.problem.problem import Problem

_COUNTS = {
    "prefix": 1, "streaming": 2, "global_window": 3, "chunks": 1, "documents": 2, "shared_question": 2, "columns": 2,
}  # fmt: skip
"""Number of values of each kind, without the diagonal."""
KINDS = tuple(_COUNTS)

_LONGEST = 4000
"""Maximum characters of a text in a link: browsers and servers limit addresses."""


def settings(problem: Problem) -> dict[str, Any]:
    """Values by name in links, for a mask beyond bands with two edges. Raises ValueError for a mask without fields, or
    too long for a link."""
    mask = problem.mask
    if isinstance(mask, Chunks):
        return {"mask": "chunks", "size": mask.size, **_diagonal(mask.diagonal)}
    if isinstance(mask, Columns):
        values = _documents(mask, problem) or _question(mask, problem) or _columns(mask, problem)
        if max(len(str(value)) for value in values.values()) > _LONGEST:
            raise ValueError(f"The mask {mask} has more numbers than a link holds.")
        return values
    values = _sets(mask) if isinstance(mask, Band) else {}
    if not values:
        raise ValueError(f"The mask {mask} cannot be set on that page.")
    return values


def mask_of(kind: str, values: Sequence[str], seqlen_k: int) -> Mask:
    """The mask of these values of :func:`settings`, as text. Raises ValueError for invalid values."""
    *numbers, diagonal = values
    if len(numbers) > _COUNTS[kind]:
        *numbers, place = numbers
        if place != "at":
            raise ValueError(place)
    if len(numbers) != _COUNTS[kind]:
        raise ValueError(kind)
    where = diagonal if diagonal in DIAGONALS else int(diagonal)
    if kind in ("documents", "columns"):
        text, causal = numbers[0], {"0": False, "1": True}.get(numbers[1])
        if causal is None:
            raise ValueError(numbers[1])
        if kind == "documents":
            return masks.documents(mask_texts.read_lengths(text), causal, seqlen=seqlen_k, diagonal=where)
        runs = mask_texts.runs_of(mask_texts.read_hidden(text), seqlen_k)
        return masks.columns(*runs, causal=causal, diagonal=where)
    if kind == "shared_question":
        answers = mask_texts.read_lengths(numbers[1])
        return masks.shared_question(int(numbers[0]), answers, seqlen=seqlen_k, diagonal=where)
    makers: dict[str, Callable[..., Mask]] = {
        "prefix": masks.prefix,
        "streaming": masks.streaming,
        "global_window": masks.global_window,
        "chunks": masks.chunks,
    }
    return makers[kind](*(None if x == NONE else int(x) for x in numbers), where)


def _diagonal(diagonal: str | int) -> dict[str, Any]:
    return {"diag": "at", "at": diagonal} if isinstance(diagonal, int) else {"diag": diagonal}


def _sets(mask: Band) -> dict[str, Any]:
    """Settings of a named band; empty for other bands, or numbers per sequence."""
    where = _diagonal(mask.diagonal)
    kinds: tuple[tuple[str, dict[str, Any], Callable[..., Mask]], ...] = (
        ("prefix", {"length": mask.prefix}, masks.prefix),
        ("streaming", {"keep": mask.keep, "window": mask.left}, masks.streaming),
        (
            "global_window",
            {"tokens": mask.prefix, "left": mask.left, "right": mask.right},
            masks.global_window,
        ),
    )
    for name, numbers, make in kinds:
        scalar = all(x is None or isinstance(x, int) for x in numbers.values())
        needed = name == "global_window" or None not in numbers.values()
        if scalar and needed and make(*numbers.values(), mask.diagonal) == mask:
            return {"mask": name, **numbers, **where}
    return {}


def _documents(mask: Columns, problem: Problem) -> dict[str, Any]:
    """Settings of a documents mask, whose keys' intervals end where documents end; empty for other masks."""
    if not mask.known or mask.spread != (1, 1):
        return {}
    ends = np.unique(mask.intervals.values[0])
    lengths = np.diff(ends[ends > 0], prepend=0)
    causal = mask.band.right is not None
    if (lengths < 0).any() or lengths.sum() > problem.seqlen_k:
        return {}
    if masks.documents(lengths, causal, seqlen=problem.seqlen_k, diagonal=mask.rows) != mask:
        return {}
    text = mask_texts.write_lengths(lengths.tolist())
    return {"mask": "documents", "lengths": text, "causal": int(causal), **_diagonal(mask.rows)}


def _question(mask: Columns, problem: Problem) -> dict[str, Any]:
    """Settings of a shared question, whose keys stay visible to the end; empty for other masks."""
    if not mask.known or mask.spread != (1, 1):
        return {}
    ends = mask.intervals.values[0, 0, 0].astype(np.int64)
    question = int(np.argmax(ends != ends[:1]))
    ends_of_answers = np.unique(ends[question:])
    answers = np.diff(ends_of_answers[ends_of_answers > 0], prepend=question)
    if not question or (answers < 0).any() or question + answers.sum() > problem.seqlen_k:
        return {}
    if masks.shared_question(question, answers, seqlen=problem.seqlen_k, diagonal=mask.rows) != mask:
        return {}
    text = mask_texts.write_lengths(answers.tolist())
    return {"mask": "shared_question", "question": question, "answers": text, **_diagonal(mask.rows)}


def _columns(mask: Columns, problem: Problem) -> dict[str, Any]:
    band = mask.band
    if band.irregular_kind or band.left is not None or band.right not in (None, 0):
        raise ValueError(f"The mask {mask} cannot be set on that page.")
    hidden = mask_texts.hidden_of(mask, problem.seqlen_q, problem.seqlen_k)
    text = mask_texts.write_hidden(hidden)
    return {"mask": "columns", "hidden": text, "causal": int(band.right == 0), **_diagonal(band.diagonal)}
