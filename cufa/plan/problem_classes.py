"""Classes of problems: a measurement of one problem holds for its class."""

from __future__ import annotations

from ..kernels import Kernel
from ..problem.problem import Problem


def tuning_key(spec: Kernel, problem: Problem) -> str:
    """Shapes that share tuned tiles: same kernel, dtype, precision, head dim, kind of mask, length class, and number of
    query rows in all to a power of two: how many thread blocks there are decides which tiles fill the GPU."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    return (
        f"{spec.name}/{problem.dtype}/{problem.precision}/d{problem.head_dim}/{problem.mask_kind}/"
        f"{_length_class(problem)}/{_power_of_two(rows)} rows"
    )


def problem_class(problem: Problem) -> str:
    """Problems among which one kernel is the fastest: same operation, elements, head dim, kind of mask, score changes
    and kind of lengths, and length class."""
    elements = "-".join(dict.fromkeys((problem.q_element.name, problem.k_element.name, problem.precision)))
    mask = problem.mask_kind + ("-softcap" if problem.softcap is not None else "")
    if problem.lengths.kind != "dense":
        mask += f"-{problem.lengths.kind}"
    return f"{problem.operation}/{elements}/d{problem.head_dim}/{mask}/{_length_class(problem)}"


def _length_class(problem: Problem) -> int:
    """The power of two nearest below seqlen_k: no choice depends on more."""
    return _power_of_two(problem.seqlen_k)


def _power_of_two(count: int) -> int:
    """The largest power of two up to ``count``; 1 for 0."""
    return 1 << max(count.bit_length() - 1, 0)
