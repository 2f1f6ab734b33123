"""Accesses of a block to shared memory, as the executor saw them: which lane touches which bytes, on which banks."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ...build.ptx import relative_place
from ...plan.operation import Arrays
from ...plan.planner import Plan
from .launch import Execution, runtime
from .run import run_plan

KINDS = ("load", "store", "ldmatrix", "stmatrix", "wgmma, operand A", "wgmma, operand B")
"""``CufaPass::Kind`` of cuda_src/host/launch.h."""
BANKS, WORD = 32, 4
_PASS = np.dtype(
    [
        ("file", np.uint64), ("line", np.int32), ("kind", np.int32), ("instruction", np.int32), ("count", np.int32),
        ("bytes", np.uint32), ("waves", np.uint32), ("addresses", np.uint32, 32), ("lanes", np.uint8, 32),
    ]
)  # fmt: skip
_CAPACITY = 1 << 17


@dataclasses.dataclass(frozen=True)
class Pass:
    """Up to 128 bytes of a warp-wide access, or one 8 × 16-byte matrix."""

    lanes: tuple[int, ...]
    """The lane of each address; of wgmma, the operand's row."""
    addresses: tuple[int, ...]
    """Offsets in the block's dynamic shared memory, bytes."""
    bytes: int
    """Bytes at each address."""

    def words(self) -> list[list[tuple[int, int]]]:
        """(word address, lane) by bank: the distinct words, which need one wavefront each."""
        banks: list[dict[int, int]] = [{} for _ in range(BANKS)]
        for lane, address in zip(self.lanes, self.addresses, strict=True):
            for word in range(address // WORD, (address + self.bytes - 1) // WORD + 1):
                banks[word % BANKS].setdefault(word, lane)
        return [list(x.items()) for x in banks]

    @property
    def wavefronts(self) -> int:
        return max(len(x) for x in self.words())


@dataclasses.dataclass(frozen=True)
class Access:
    """The first execution of one source line's access by a warp."""

    kind: str
    file: str
    """Path below ``cuda_src``."""
    line: int
    passes: tuple[Pass, ...]
    times: int
    """Executions by all warps of the run."""

    @property
    def wavefronts(self) -> int:
        return sum(x.wavefronts for x in self.passes)


def shared_accesses(plan: Plan, given: Arrays) -> tuple[Access, ...]:
    """Execute a plan, and return its accesses to shared memory by source line. TMA writes whole rows and is not among
    them. Raises as :func:`cufa.emulate`."""
    kept = np.zeros(_CAPACITY, _PASS)
    keep = runtime().cufa_keep_passes
    keep(kept.ctypes.data, len(kept))
    try:
        run_plan(plan, given, Execution("counted", threads=1), trace=False)
    finally:
        count = keep(None, 0)
    return tuple(_grouped(kept[:count]))


def _grouped(kept: npt.NDArray[Any]) -> list[Access]:
    accesses = []
    places = np.stack([kept["file"].astype(np.int64), kept["line"], kept["kind"]], axis=1)
    for place in dict.fromkeys(map(tuple, places.tolist())):
        mine = kept[(places == place).all(axis=1)]
        first = mine[mine["instruction"] == mine["instruction"][0]]
        path = ctypes.string_at(int(place[0])).decode()
        passes = tuple(
            Pass(
                tuple(x["lanes"][: x["count"]].tolist()),
                tuple(x["addresses"][: x["count"]].tolist()),
                int(x["bytes"]),
            )
            for x in first
        )
        times = len(np.unique(mine["instruction"]))
        accesses.append(Access(KINDS[place[2]], relative_place(path), int(place[1]), passes, times))
    return accesses
