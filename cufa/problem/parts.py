"""The parts of a problem that have one score matrix each: sequences of different lengths, and sequences or heads with
masks of their own. A part is a dense problem; what is true of the whole is a sum over its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .lengths import DENSE, Cached

if TYPE_CHECKING:
    from .problem import Problem

ALL = slice(None)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some sequences and heads, as slices of arrays (batch, heads, seqlen, head_dim)."""

    problem: Problem
    """Dense, with one mask for all its sequences and heads."""
    sequence: int
    """Index of the first sequence in the whole problem."""
    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    keys: slice

    def queries(self, x: Any) -> Any:
        """This part of an array of queries, or of one number per query."""
        return x[self.batch, self.heads, self.rows]

    def of_keys(self, x: Any) -> Any:
        return x[self.batch, self.kv_heads, self.keys]


def parts(problem: Problem) -> tuple[Part, ...]:
    """Where numbers are known on a GPU alone, of what they may be at most (:attr:`Mask.outline`)."""
    return tuple(_parts(dataclasses.replace(problem, mask=problem.mask.outline)))


def _parts(problem: Problem) -> Iterator[Part]:
    of_batch, of_heads = problem.mask.spread
    sequences = problem.lengths.places()
    if sequences is None and (of_batch, of_heads) == (1, 1):
        dense = (
            problem if isinstance(problem.lengths, Cached) else dataclasses.replace(problem, lengths=DENSE)
        )
        yield Part(dense, 0, ALL, ALL, ALL, ALL, ALL)
        return
    if sequences is None:
        step = 1 if of_batch > 1 else max(problem.batch, 1)
        sequences = [(b, slice(b, b + step), ALL, ALL) for b in range(0, problem.batch, step)]
    kv_heads = 1 if of_heads > 1 else problem.kv_heads
    for sequence, batch, rows, keys in sequences:
        for head in range(0, problem.kv_heads, max(kv_heads, 1)):
            yield Part(
                dataclasses.replace(
                    problem,
                    batch=batch.stop - batch.start,
                    heads=kv_heads * problem.group_size,
                    kv_heads=kv_heads,
                    seqlen_q=problem.seqlen_q if rows == ALL else rows.stop - rows.start,
                    seqlen_k=problem.seqlen_k if keys == ALL else keys.stop - keys.start,
                    mask=problem.mask.at(sequence, head),
                    lengths=DENSE,
                ),
                sequence,
                batch,
                slice(head, head + kv_heads),
                slice(head * problem.group_size, (head + kv_heads) * problem.group_size),
                rows,
                keys,
            )
