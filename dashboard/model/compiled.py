"""Registers and other resources of each kernel × tiles × architecture, compiled on this machine."""

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
    """Bytes of spilled registers that a thread stores and loads."""
    split: tuple[int, ...] = ()
    """Registers per thread that warpgroups request (``setmaxnreg``), in ascending order."""

    def occupancy(self, arch: Architecture) -> Occupancy:
        taken = {"registers": self.registers, "threads": self.threads, "barriers": self.barriers}
        return occupancy(arch, shared_memory=self.shared_bytes, **taken)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of one variant. If it does not compile, ``entries`` is empty and ``findings`` has the reason."""

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
    """Problems of all builds of the kernel: element types, kinds of mask, soft cap, lengths."""
    problems = OPERATIONS[spec.operation].compiled(spec, head_dim)
    return [problem for problem in problems if spec.refuses(problem) is None]
