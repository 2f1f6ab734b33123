"""Which rows and traces were measured with the machine code that the current sources give under the pinned NVRTC."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cufa.build.compiler import trace_constants, translation_unit
from cufa.build.score_text import score_text
from cufa.build.static_compile import CompileError, CompileReport, compile_text, nvrtc_version
from cufa.gpu.architectures import Architecture, find_architecture
from cufa.kernels import KERNELS
from cufa.measure import cards
from cufa.measure.kernel_runs import KernelRun
from cufa.measure.measured import Measured, digest
from cufa.problem.problem import Problem

from .card_file import CardFile
from .traced import TRACES

#: Sections with instructions and constants. Not .nv.constant0: it holds the parameters, so its size changes with
#: theirs although no instruction does.
_CODE = re.compile(r"\.text\.|\.nv\.constant[1-35-9]|\.rodata")


@dataclasses.dataclass(frozen=True)
class Build:
    """One translation unit for one architecture."""

    unit: str
    arch: Architecture


Question = tuple[str, Problem, Any, str, dict[str, bool]]
"""Kernel, problem, tile config or its JSON, architecture, and arguments of
:func:`~cufa.build.compiler.trace_constants` of a row or trace."""


def build_of(kernel: str, problem: Problem, config: Any, arch: str, trace: dict[str, bool]) -> Build | None:
    """The build of a row or trace. None: the current kernel does not have this config."""
    try:
        spec = KERNELS[kernel]
        tiles = spec.read_config(config) if isinstance(config, dict) else config
        constants = {**spec.constants(problem, tiles), **trace_constants(**{"trace": False, **trace})}
        score = score_text(problem, spec.folds_score_scale)
        return Build(translation_unit(spec.source_of(tiles), constants, score), find_architecture(arch))
    except (KeyError, TypeError, ValueError):
        return None


def stamped() -> dict[str, Question]:
    """A row or trace of each digest."""
    found = {}
    for card in cards.load_all().values():
        found |= {
            row.json["code"]: _of_row(card, row) for row in card.rows if row.is_ours and row.json.get("code")
        }
    for module, folder, how in TRACES:
        found |= {x.code: _of_trace(x, how) for x in module.load_all(folder).values() if x.code}
    return found


def _of_row(card: cards.Card, row: Measured) -> Question:
    return row.json["kernel"], row.problem, row.json["config"], card.environment["arch"], {}


def _of_trace(trace: KernelRun, how: dict[str, bool]) -> Question:
    return trace.kernel, trace.problem, trace.config, trace.environment["arch"], how


def digest_of(build: Build | None) -> str:
    """Digest of the machine code of a build; "" if the compilation fails. Takes 1.5 s."""
    try:
        return code_digest(compile_text(build.unit, build.arch)) if build else ""
    except CompileError:
        return ""


def code_digest(report: CompileReport) -> str:
    """Digest of instructions, constants, registers and shared memory, 16 hexadecimal digits: two builds with the same
    digest run the same instructions. Raises ImportError without pyelftools."""
    from elftools.elf.elffile import ELFFile

    digest = hashlib.sha256()
    for section in ELFFile(io.BytesIO(report.cubin)).iter_sections():
        if _CODE.match(section.name):
            digest.update(section.name.encode() + section.data())
    registers = [(e.name, e.registers, e.static_shared_bytes) for e in report.entries]
    return hashlib.sha256(digest.digest() + repr(registers).encode()).hexdigest()[:16]


def compiled(builds: Iterable[Build | None], jobs: int) -> dict[Build | None, str]:
    todo = list(dict.fromkeys(builds))
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(todo, pool.map(digest_of, todo), strict=True))


def pinned_nvrtc() -> str:
    """The NVRTC version with which the digests were made."""
    return str(json.loads(cards.CURRENT.read_text(encoding="utf-8"))["nvrtc"])


def wrong(sample: Iterable[str], jobs: int = 1) -> list[str]:
    """Digests in ``sample`` that ``machine_code.json`` lists wrongly: as current though stale, or the reverse."""
    known, current = stamped(), cards.current_code()
    wanted = {code: build_of(*known[code]) for code in sample}
    found = compiled(wanted.values(), jobs)
    return [code for code, build in wanted.items() if (found[build] == code) != (code in current)]


def stamp(jobs: int) -> str:
    """Add digests to rows and traces measured with the current sources, and write which digests are current."""
    for name in cards.load_all():
        file = CardFile(cards.RECORDS_DIR / f"{name}.jsonl", {})
        card = file.card
        fresh = [r for r in card.rows if r.is_ours and "code" not in r.json and _is_of_today(r.json)]
        builds = [build_of(*_of_row(card, row)) for row in fresh]
        codes = compiled(builds, jobs)
        for row, build in zip(fresh, builds, strict=True):
            row.json["code"] = codes[build] or None  # also changes file.lines, which share this JSON
        file.rewrite()
    for module, folder, how in TRACES:
        for trace in module.load_all(folder).values():
            if trace.code is None and trace.digest == digest(KERNELS[trace.kernel]):
                code = digest_of(build_of(*_of_trace(trace, how)))
                module.save(dataclasses.replace(trace, code=code), folder)
    wanted = {code: build_of(*question) for code, question in stamped().items()}
    found = compiled(wanted.values(), jobs)
    current = sorted(code for code, build in wanted.items() if found[build] == code)
    text = json.dumps({"nvrtc": nvrtc_version(), "current": current}, indent=0)
    cards.CURRENT.write_text(text + "\n", encoding="utf-8")
    cards.current_code.cache_clear()
    return f"{len(current)} of {len(wanted)} builds give the same machine code"


def _is_of_today(row: dict[str, Any]) -> bool:
    return row["kernel"] in KERNELS and row["digest"] == digest(KERNELS[row["kernel"]])
