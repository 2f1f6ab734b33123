"""What kernels are told of a mask beside its band: ``MaskParams`` of cuda_src/shared/params.cuh, without the
addresses, and
what they keep of it in their workspace. Pure: who has the memory fills in where the numbers are."""

from __future__ import annotations

from typing import Any

from .columns import Chunks, Columns
from .integers import INT32, Integers
from .mask import Band
from .mask_family import shift_of
from .problem import Problem

_RUN_BYTES, _EXTREMES_BYTES = 8, 16  # of a key, and of a block of keys: shared/irregular_mask.cuh


def columns_of(problem: Problem) -> Columns | None:
    """The problem's mask if it has numbers per key, else None."""
    mask = problem.mask
    return mask.columns(problem.seqlen_k) if isinstance(mask, (Columns, Chunks)) else None


def numbers(problem: Problem) -> dict[str, int]:
    """The members of ``MaskParams`` that are numbers, without the place in the workspace."""
    columns, (sq, sk) = columns_of(problem), (problem.seqlen_q, problem.seqlen_k)
    found = {}
    if columns is not None:
        _, sequences, heads, keys = columns.intervals.shape
        shift = shift_of(columns.rows, sq, sk)
        found = {"sequences": sequences, "heads": heads, "keys": keys, "run_shift": shift}
    elif isinstance(problem.mask, Band):
        mask = problem.mask
        sets = {"prefix": mask.prefix, "keep": mask.keep, "global_tokens": mask.global_tokens}
        # Of numbers in memory, the step from sequence to sequence.
        found = {
            name: min(x, int(INT32.max)) if isinstance(x, int) else int(x.shape[0] > 1)
            for name, x in sets.items()
        }
    return found


def arrays(problem: Problem) -> dict[str, Integers]:
    """The members that are pointers, and what they point to."""
    columns = columns_of(problem)
    if columns is not None:
        return {"runs": columns.intervals}
    if isinstance(problem.mask, Band):
        mask = problem.mask
        sets = {"prefix_of": mask.prefix, "keep_of": mask.keep, "global_of": mask.global_tokens}
        return {name: x for name, x in sets.items() if isinstance(x, Integers)}
    return {}


def workspace_bytes(problem: Problem, block_kv: int) -> int:
    """Runs of whole blocks of keys, and what is least and greatest in each block."""
    columns = columns_of(problem)
    if columns is None:
        return 0
    _, sequences, heads, _ = columns.intervals.shape
    blocks = sequences * heads * columns.num_intervals * -(-problem.seqlen_k // block_kv)
    return blocks * (block_kv * _RUN_BYTES + _EXTREMES_BYTES)


def fill(params: Any, plan: Any) -> None:
    """``MaskParams`` within a parameter structure, for a :class:`~cufa.plan.planner.Plan`."""
    for name, value in numbers(plan.problem).items():
        setattr(params, name, value)
    params.workspace = plan.workspace - workspace_bytes(plan.problem, plan.config.block_kv)
