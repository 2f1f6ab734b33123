"""Loops of machine code: found from its jumps, wherever the compiler put their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Jump:
    """An instruction that need not continue with the next instruction."""

    index: int
    target: int | None
    """Index of an instruction; None: the program ends here, or the target is unknown."""
    always: bool
    """It never continues with the next instruction."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A natural loop: the instructions of all paths from the head back to the head."""

    head: int
    parts: tuple[tuple[int, int], ...]
    """First and last index of each stretch, in order."""

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.parts)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(first <= index <= last for first, last in self.parts)

    @property
    def indices(self) -> set[int]:
        return {n for first, last in self.parts for n in range(first, last + 1)}


def loops_of(count: int, jumps: Iterable[Jump]) -> tuple[Loop, ...]:
    """Natural loops of ``count`` instructions, by head; loops with the same head are merged."""
    listed = list(jumps)
    starts = _starts(count, listed)
    block_of = {start: number for number, start in enumerate(starts)}
    ends = [*(start - 1 for start in starts[1:]), count - 1]
    after = _successors(count, listed, block_of, ends)
    before: list[list[int]] = [[] for _ in starts]
    for block, targets in enumerate(after):
        for target in targets:
            before[target].append(block)
    dominators = _dominators(after, before)
    bodies: dict[int, set[int]] = {}
    for block, targets in enumerate(after):
        for head in targets:
            if head in dominators.get(block, ()):
                bodies.setdefault(head, {head}).update(_body(block, head, before))
    return tuple(
        Loop(starts[head], _stretches([(starts[b], ends[b]) for b in sorted(body)]))
        for head, body in sorted(bodies.items())
    )


def _starts(count: int, jumps: Sequence[Jump]) -> list[int]:
    """First instructions of basic blocks."""
    starts = {0} | {jump.index + 1 for jump in jumps} | {j.target for j in jumps if j.target is not None}
    return sorted(n for n in starts if 0 <= n < count)


def _successors(
    count: int, jumps: Sequence[Jump], block_of: dict[int, int], ends: Sequence[int]
) -> list[list[int]]:
    jump_at = {jump.index: jump for jump in jumps}
    successors = []
    for end in ends:
        jump = jump_at.get(end)
        targets = [] if jump is None or jump.target is None else [jump.target]
        if (jump is None or not jump.always) and end + 1 < count:
            targets.append(end + 1)
        successors.append([block_of[target] for target in targets if target in block_of])
    return successors


def _dominators(after: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """For each reachable block: the blocks on every path to it, itself included."""
    reached, pending = {0}, [0]
    while pending:
        for target in after[pending.pop()]:
            if target not in reached:
                reached.add(target)
                pending.append(target)
    dominators = {block: set(reached) for block in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            now = set.intersection(*(dominators[b] for b in before[block] if b in reached)) | {block}
            if now != dominators[block]:
                dominators[block], changed = now, True
    return dominators


def _body(tail: int, head: int, before: Sequence[Sequence[int]]) -> set[int]:
    """Blocks from which ``tail`` is reached without passing ``head``."""
    body, pending = {head, tail}, [tail] if tail != head else []
    while pending:
        for block in before[pending.pop()]:
            if block not in body:
                body.add(block)
                pending.append(block)
    return body


def _stretches(blocks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """First and last index of each run of adjacent blocks."""
    stretches: list[tuple[int, int]] = []
    for first, last in blocks:
        if stretches and stretches[-1][1] + 1 == first:
            stretches[-1] = stretches[-1][0], last
        else:
            stretches.append((first, last))
    return tuple(stretches)
