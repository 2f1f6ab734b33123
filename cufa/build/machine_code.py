"""Instructions of a kernel with the source lines that they come from: counted per line, and per loop.

PTX (:mod:`cufa.build.ptx`) and SASS (:mod:`cufa.build.sass`) are parsed to the same classes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .flow import Loop

#: Kinds of instructions, with descriptions.
KINDS = {
    "tensor": "products on the tensor cores",
    "exp": "exponentials (the special function unit)",
    "float": "other arithmetic with floating-point numbers",
    "shared": "loads and stores of shared memory",
    "global": "loads and stores of device memory",
    "copy": "asynchronous copies between device and shared memory",
    "spill": "loads and stores of local memory: spilled registers",
    "wait": "barriers and waiting",
    "branch": "branches, calls and ends",
    "other": "integers, addresses, moves, predicates",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a source file."""

    file: str
    """Below ``cuda_src``."""
    line: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction."""

    text: str
    kind: str
    """One of :data:`KINDS`."""
    places: tuple[Place, ...]
    """Where it comes from: the line itself, then the line that the function was inlined into, and so on."""
    live: int | None = None
    """Live registers of a thread here; None before registers are allocated (PTX)."""

    def line_in(self, file: str) -> int | None:
        """The innermost line of a file that it comes from."""
        return next((place.line for place in self.places if place.file == file), None)


@dataclasses.dataclass(frozen=True)
class LineCost:
    """The instructions that one source line became."""

    line: int
    count: int
    kinds: Mapping[str, int]
    live: int | None
    """Most registers that are live at one of its instructions."""


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """One pass through a loop by one warp, both sides of branches counted: an instruction is an issue slot."""

    place: Place | None
    """The line that its first stretch ends with."""
    slots: int
    kinds: Mapping[str, int]
    flops: int
    """Floating-point operations of one warp's products."""


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel entry."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]

    @functools.cached_property
    def files(self) -> dict[str, int]:
        """Instructions of each file, its own or of functions inlined from there: most first, then by name."""
        counts = Counter(f for i in self.instructions for f in {place.file for place in i.places})
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def kinds(self) -> dict[str, int]:
        return _counted(self.instructions)

    @property
    def live(self) -> int | None:
        """Most registers that are live at once."""
        return max((i.live for i in self.instructions if i.live is not None), default=None)

    def lines(self, file: str) -> dict[int, LineCost]:
        """The instructions of each line of a file, including functions of other files that are inlined there."""
        by_line: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            line = instruction.line_in(file)
            if line is not None:
                by_line.setdefault(line, []).append(instruction)
        return {line: _line_cost(line, instructions) for line, instructions in sorted(by_line.items())}

    def of_line(self, file: str, line: int) -> list[Instruction]:
        """The instructions of a line, in program order."""
        return [i for i in self.instructions if i.line_in(file) == line]

    @functools.cached_property
    def product_loops(self) -> list[Loop]:
        """Loops with products outside of their inner loops: in an attention kernel the loops over tiles, and the loop
        over work items around them."""
        loops = {self._innermost(n) for n, i in enumerate(self.instructions) if i.kind == "tensor"}
        return sorted(filter(None, loops), key=lambda loop: loop.head)

    def tile_loops(self, file: str = "") -> list[LoopCost]:
        """The cost of one pass of each of :attr:`product_loops`, without loops inside it. ``file``: whose lines locate
        the loops."""
        costs = []
        for loop in self.product_loops:
            own = loop.indices
            for other in self.loops:
                if other.head in loop and other.head != loop.head:
                    own -= other.indices
            inside = [self.instructions[n] for n in sorted(own)]
            costs.append(
                LoopCost(
                    self._place(loop, file),
                    len(inside),
                    _counted(inside),
                    sum(flops_of(i.text) for i in inside),
                )
            )
        return costs

    def _place(self, loop: Loop, file: str) -> Place | None:
        """The line at the end of the loop's first stretch: the jump back, unless the loop is in several stretches."""
        last = self.instructions[loop.parts[0][1]]
        line = last.line_in(file)
        return Place(file, line) if line is not None else next(iter(last.places), None)

    def _innermost(self, index: int) -> Loop | None:
        return min((loop for loop in self.loops if index in loop), key=len, default=None)

    # --- Kept on disk -------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """The code as JSON; each chain of places is stored once."""
        chains: dict[tuple[Place, ...], int] = {}
        rows = [[i.text, i.kind, chains.setdefault(i.places, len(chains)), i.live] for i in self.instructions]
        return {
            "chains": [[[place.file, place.line] for place in chain] for chain in chains],
            "instructions": rows,
            "loops": [[loop.head, [list(part) for part in loop.parts]] for loop in self.loops],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Code:
        chains = [tuple(Place(*place) for place in chain) for chain in content["chains"]]
        rows = (
            Instruction(text, kind, chains[chain], live)
            for text, kind, chain, live in content["instructions"]
        )
        loops = (Loop(head, tuple((a, b) for a, b in parts)) for head, parts in content["loops"])
        return cls(tuple(rows), tuple(loops))


def _line_cost(line: int, instructions: list[Instruction]) -> LineCost:
    live = max((i.live for i in instructions if i.live is not None), default=None)
    return LineCost(line, len(instructions), _counted(instructions), live)


def _counted(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by kind, in the order of :data:`KINDS`."""
    counts = Counter(i.kind for i in instructions)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


Patterns = Sequence[tuple[str, re.Pattern[str]]]
"""Kinds, each with the opcodes that it has. An opcode is of the first kind that it matches."""

_GUARD = re.compile(r"^@!?\S+\s+")


def kind_of(text: str, kinds: Patterns) -> str:
    """The kind that an instruction counts as; its guard is ignored."""
    opcode = _GUARD.sub("", text).partition(" ")[0]
    return next((kind for kind, pattern in kinds if pattern.match(opcode)), "other")


_SHAPES = (
    # PTX: mma.sync.aligned.m16n8k16…, wgmma.mma_async.sync.aligned.m64n128k16… (of four warps)
    (re.compile(r"\b(wg)?mma\S*\.m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)"), ()),
    # SASS: HMMA.16816…, HMMA.1688…: 16 × 8 × the rest
    (re.compile(r"\bHMMA\.168(?P<k>\d+)\b"), (("m", 16), ("n", 8))),
    # SASS: HGMMA.64x128x16…
    (re.compile(r"\b[HQI]GMMA\.(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)"), ()),
)
_GROUP_ROWS, _GROUP_WARPS = 64, 4


def flops_of(text: str) -> int:
    """Floating-point operations of one warp's share of a product instruction; 0 for anything else."""
    for pattern, known in _SHAPES:
        match = pattern.search(text)
        if match:
            size = {**dict(known), **{name: int(value) for name, value in match.groupdict().items()}}
            whole = 2 * size["m"] * size["n"] * size["k"]
            return whole // _GROUP_WARPS if size["m"] == _GROUP_ROWS else whole
    return 0
