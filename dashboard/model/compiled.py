"""Registers and the rest of every kernel × tiles × architecture: compiled here, in the background, once.

Results are kept in the user's cache folder under a key of everything that decides them (sources, constants,
options, NVRTC's version), so that they are never out of date.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cufa.build.ptx import register_splits
from cufa.build.sweep import build
from cufa.build.variants import Variant
from cufa.dashboard.model.builder import Builder
from cufa.gpu.architectures import Architecture
from cufa.gpu.occupancy import Occupancy, occupancy
from cufa.kernels import Kernel
from cufa.plan.operation import OPERATIONS
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel launch of a variant, as compiled."""

    name: str
    registers: int
    threads: int
    shared_bytes: int
    barriers: int
    spill_bytes: int
    """Stored and loaded, per thread."""
    split: tuple[int, ...] = ()
    """Registers per thread that warpgroups ask for when they begin (``setmaxnreg``), fewest first."""

    def occupancy(self, arch: Architecture) -> Occupancy:
        return occupancy(
            arch,
            registers=self.registers,
            threads=self.threads,
            shared_memory=self.shared_bytes,
            barriers=self.barriers,
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of one variant; ``entries`` is empty when it does not compile, and ``findings`` says why."""

    entries: tuple[Entry, ...]
    findings: tuple[str, ...]


class Compiler(Builder[Compiled]):
    """Compiles variants."""

    folder = "static"

    def make(self, variant: Variant) -> dict[str, Any]:
        result = build(variant)
        splits = {} if result.report is None else register_splits(result.report.ptx)
        entries = [
            {
                "name": row["entry"],
                "split": splits.get(row["entry"], ()),
                **{k: row[k] for k in ("registers", "threads", "shared_bytes", "barriers")},
                "spill_bytes": row["spill_store_bytes"] + row["spill_load_bytes"],
            }
            for row in result.rows()
            if "entry" in row
        ]
        return {"entries": entries, "findings": list(result.findings)}

    def read(self, content: Mapping[str, Any]) -> Compiled:
        return Compiled(
            tuple(Entry(**{**e, "split": tuple(e["split"])}) for e in content["entries"]),
            tuple(content["findings"]),
        )


def compiled_problems(spec: Kernel, head_dim: int) -> list[Problem]:
    """What the kernel is built for: every element with every kind of mask, cap and lengths."""
    found = OPERATIONS[spec.operation].compiled(spec, head_dim)
    return [problem for problem in found if spec.refuses(problem) is None]
