"""Stall reasons by instruction and source line, from a report of NVIDIA's Nsight Compute with source counters.

Two forms are read: the text of ``ncu --import REPORT --page source --csv``, and the report itself if NVIDIA's Python
package ``ncu_report`` (in Nsight Compute's folder ``extras/python``) can be imported.

The text has, for each kernel, an optional line ``"Kernel Name","…"``, a line of column names that begins with
``"Address","Source"``, and a line for each SASS instruction. Columns ``stall_…`` count warp samples by reason.
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cufa.build.machine_code import Code, Place

HOW = "cufa profile nvidia-h200.forward.0 -o report"
_SAMPLES = ("Warp Stall Sampling (All Samples)", "Warp Stall Sampling (All Cycles)", "# Samples")
_REASON, _NOT_ISSUED = "stall_", "Not Issued"
_METRIC = "smsp__pcsamp_warps_issue_stalled_"
EXECUTED, WAVEFRONTS, EXCESSIVE = (
    "Instructions Executed",
    "L1 Wavefronts Shared",
    "L1 Wavefronts Shared Excessive",
)


class NotStallsError(ValueError):
    """The file is not a report with source counters; the message says how to make one."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One SASS instruction."""

    text: str
    samples: int
    """Warp samples that found a warp at this instruction."""
    reasons: Counter[str]
    """These samples by stall reason; "selected" means issued, not stalled."""
    counters: dict[str, int]
    """:data:`EXECUTED`, :data:`WAVEFRONTS` and :data:`EXCESSIVE`, where the report has them."""


@dataclasses.dataclass(frozen=True)
class Profiled:
    """One kernel of a report."""

    kernel: str
    instructions: tuple[Sampled, ...]

    @property
    def samples(self) -> int:
        return sum(x.samples for x in self.instructions)

    @property
    def reasons(self) -> Counter[str]:
        return sum((x.reasons for x in self.instructions), Counter())

    def total(self, counter: str) -> int:
        return sum(x.counters.get(counter, 0) for x in self.instructions)

    def is_of(self, code: Code) -> bool:
        """Whether the report's instructions are those of a build compiled here."""
        opcodes = [_opcode(x.text) for x in code.instructions]
        return opcodes == [_opcode(x.text) for x in self.instructions]

    def by_line(self, code: Code, file: str) -> dict[int, Sampled]:
        """Sums of the instructions that come from each line of a file. ``code`` has the same instructions."""
        by_line: dict[int, list[Sampled]] = {}
        for built, sampled in zip(code.instructions, self.instructions, strict=True):
            line = built.line_in(file)
            if line is not None:
                by_line.setdefault(line, []).append(sampled)
        return {line: _sum(x) for line, x in by_line.items()}

    def hottest(self, code: Code) -> Place | None:
        """The innermost source line with the most samples."""
        counted: Counter[Place] = Counter()
        for built, sampled in zip(code.instructions, self.instructions, strict=True):
            if built.places:
                counted[built.places[0]] += sampled.samples
        return max(counted, key=lambda place: counted[place], default=None)


def _sum(parts: Sequence[Sampled]) -> Sampled:
    names = dict.fromkeys(name for x in parts for name in x.counters)
    counters = {name: sum(x.counters.get(name, 0) for x in parts) for name in names}
    return Sampled("", sum(x.samples for x in parts), sum((x.reasons for x in parts), Counter()), counters)


def _opcode(text: str) -> str:
    """The opcode: MUFU.EX2 for "@!P0 MUFU.EX2 R3, R4 ;"."""
    words = text.split()
    return next((word.rstrip(";,") for word in words if not word.startswith("@")), "")


def parse(text: str) -> list[Profiled]:
    """The kernels of ``--page source --csv``. Raises NotStallsError for other text."""
    name, columns, listed = "", list[str](), list[tuple[str, list[Sampled]]]()
    for row in csv.reader(text.splitlines()):
        if row[:1] == ["Kernel Name"]:
            name, columns = row[1] if len(row) > 1 else "", []
        elif "Address" in row and "Source" in row:
            columns = row
            listed.append((name, []))
        elif columns and len(row) == len(columns):
            listed[-1][1].append(_sampled(dict(zip(columns, row, strict=True))))
    kernels = [Profiled(name, tuple(x)) for name, x in listed if x]
    if not any(x.samples for x in kernels):
        raise NotStallsError(f"it has no instructions with samples. Make one with: {HOW}")
    return kernels


def _sampled(cells: dict[str, str]) -> Sampled:
    samples = next((_number(cells[name]) for name in _SAMPLES if name in cells), 0)
    named = {
        name: x
        for name, x in cells.items()
        if name.startswith((_REASON, _METRIC)) and _NOT_ISSUED not in name
    }
    reasons = Counter({_reason(name): _number(x) for name, x in named.items()})
    counters = {name: _number(cells[name]) for name in (EXECUTED, WAVEFRONTS, EXCESSIVE) if name in cells}
    return Sampled(cells["Source"].strip(), samples, +reasons, counters)


def _reason(name: str) -> str:
    return name.removeprefix(_REASON).removeprefix(_METRIC).replace("_", " ")


def _number(cell: str) -> int:
    """A count; an empty cell or "-" is 0. Raises NotStallsError for other text."""
    try:
        return int(float(cell.replace(",", ""))) if cell.strip() not in ("", "-") else 0
    except ValueError:
        raise NotStallsError(f"{cell!r} is not a count. Make a file with: {HOW}") from None


def of_report(path: Path) -> list[Profiled]:
    """The kernels of a ``.ncu-rep``. Raises NotStallsError if ``ncu_report`` cannot be imported, or no kernel has
    samples."""
    try:
        import ncu_report  # type: ignore[import-not-found]
    except ImportError:
        raise NotStallsError(
            "reading a .ncu-rep needs NVIDIA's ncu_report: add Nsight Compute's folder extras/python to PYTHONPATH, or "
            "attach the text of: ncu --import REPORT --page source --csv"
        ) from None
    kernels = [_kernel_of(action) for launches in ncu_report.load_report(str(path)) for action in launches]
    if not any(x.samples for x in kernels):
        raise NotStallsError(f"its kernels have no warp samples. Make one with: {HOW}")
    return kernels


def _kernel_of(action: Any) -> Profiled:
    """Instances of a metric are its values by program counter (``correlation_ids``)."""
    reasons: dict[int, Counter[str]] = {}
    for name in action:
        if name.startswith(_METRIC) and not name.endswith("_not_issued"):
            for pc, count in _instances(action[name]):
                reasons.setdefault(pc, Counter())[_reason(name)] += count
    texts = ((pc, action.sass_by_pc(pc)) for pc in sorted(reasons))
    made = (Sampled(text, sum(reasons[pc].values()), +reasons[pc], {}) for pc, text in texts)
    return Profiled(action.name(), tuple(made))


def _instances(metric: Any) -> Iterator[tuple[int, int]]:
    places = metric.correlation_ids()
    for n in range(metric.num_instances()):
        yield places.as_uint64(n), metric.as_uint64(n)
