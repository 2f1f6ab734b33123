"""Evidence whose kernel's sources have changed while its machine code has not: both are compiled, and where code and
data are the same, byte for byte, with the registers and shared memory that they take, the evidence is that of the
sources as they are now.

Both are built with the constants and launched as this version of the package says. What the host does (grids, orders,
choice of tiles) is not compared: `cufa evidence stale` names rows that would be planned otherwise.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elftools.elf.elffile import ELFFile

from ..build.compiler import source_digest, trace_constants, translation_unit
from ..build.sass import disassemble
from ..build.static_compile import CompileError, compile_text
from ..build.variants import variants
from ..gpu.architectures import Architecture, find_architecture
from ..kernels import KERNELS, Kernel, TileConfig
from ..problem.problem import Problem
from . import inside, records, traces
from .records import Json

Say = Callable[[str], None]

#: Sections. Not .nv.constant0, which the driver fills with parameters: where a structure grows at its end, its
#: size alone changes.
_CODE = re.compile(r"\.text\.|\.nv\.constant[1-35-9]|\.rodata")
_VARIABLES = re.compile(r"\.nv\.global|\.nv\.constant4")


@dataclasses.dataclass(frozen=True)
class Build:
    """One translation unit, for one architecture."""

    unit: str
    arch: Architecture

    @classmethod
    def of(
        cls, spec: Kernel, problem: Problem, config: TileConfig, arch: Architecture, **trace: bool
    ) -> Build:
        """``trace``: what :func:`~cufa.build.compiler.trace_constants` takes."""
        constants = {**spec.constants(problem, config), **trace_constants(**{"trace": False, **trace})}
        return cls(translation_unit(spec.source, constants), arch)

    def is_same(self, before: Path) -> bool:
        try:
            now, then = (compile_text(self.unit, self.arch, sources=x) for x in (None, before))
        except CompileError:  # tiles that the sources as they were did not know, or those that are
            return False
        codes, variables = ([_sections(x.cubin, name) for x in (then, now)] for name in (_CODE, _VARIABLES))
        # Tables that no instruction reads are kept in a module, too.
        same_data = variables[0] == variables[1] or not _reads_variables(now.cubin)
        return then.entries == now.entries and codes[0] == codes[1] and same_data


class SameCode:
    """What evidence becomes, where sources as they were lie in the folder ``before``. Raises ValueError where no
    kernel's do."""

    def __init__(self, before: Path, say: Say) -> None:
        self.before, self.say = before, say
        self._compared: dict[Build, bool] = {}
        files = {spec.source for spec in KERNELS.values()}
        self._digests = {x: source_digest(x, before) for x in files if (before / x).is_file()}
        if not self._digests:
            raise ValueError(
                f"{before} has no kernels: name a folder cuda_src, of another checkout for example"
            )

    def is_of_before(self, kernel: str, digest: str) -> bool:
        """Whether evidence is of the sources as they were, and no longer of those that are."""
        known = kernel in KERNELS and digest == self._digests.get(KERNELS[kernel].source)
        return known and digest != records.digest(KERNELS[kernel])

    def compare(self, builds: Iterable[Build]) -> None:
        new = list(dict.fromkeys(x for x in builds if x not in self._compared))
        if new:
            self.say(f"{len(new)} builds")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._compared |= zip(new, pool.map(lambda build: build.is_same(self.before), new), strict=True)

    def restamp_record(self, record: Json) -> bool:
        """Rows become those of the sources that are, where their build is the same; and a kernel, of which tests ran
        many other builds, where those of all its rows and variants are. False where nothing became anything."""
        arch = find_architecture(record["environment"]["arch"])
        rows = {id(row): (row, self._build_of(row, arch)) for row in _rows(record) if self._is_old(row)}
        self.compare(build for _, build in rows.values())
        for row, build in rows.values():
            if self._compared[build]:
                row["digest"] = records.digest(KERNELS[row["kernel"]])
        found = any(self._compared[build] for _, build in rows.values())
        for name, kernel in record["kernels"].items():
            if not self.is_of_before(name, kernel["digest"]):
                continue
            own = [self._compared[build] for row, build in rows.values() if row["kernel"] == name]
            self.say(f"{name}: {sum(own)} of {len(own)} rows are of the same machine code")
            if all(own) and self._variants_are_same(name, arch):
                kernel["digest"] = records.digest(KERNELS[name])
                found = True
        return found

    def _variants_are_same(self, kernel: str, arch: Architecture) -> bool:
        builds = [
            Build(translation_unit(x.source, x.constants), x.arch)
            for x in variants((arch.capability,), (kernel,))
        ]
        self.compare(builds)
        same = sum(self._compared[x] for x in builds)
        self.say(f"{kernel}: {same} of {len(builds)} variants are")
        return same == len(builds)

    def _is_old(self, row: Json) -> bool:
        return self.is_of_before(row["kernel"], row["digest"])

    @staticmethod
    def _build_of(row: Json, arch: Architecture) -> Build:
        spec = KERNELS[row["kernel"]]
        return Build.of(spec, Problem.from_json(row["problem"]), spec.read_config(row["config"]), arch)

    def restamp_traces(self, folder: Path) -> None:
        """Likewise the traces in a folder of records."""
        for module, name, options in (
            (traces, "traces", {"trace": True}),
            (inside, "inside", {"inside": True}),
        ):
            for file, trace in module.load_all(folder / name).items():
                if not self.is_of_before(trace.kernel, trace.digest):
                    continue
                spec, arch = KERNELS[trace.kernel], find_architecture(trace.environment["arch"])
                build = Build.of(spec, trace.problem, trace.config, arch, **options)
                self.compare([build])
                self.say(f"{file}: {'the same' if self._compared[build] else 'another'} machine code")
                if self._compared[build]:
                    module.save(dataclasses.replace(trace, digest=records.digest(spec)), folder / name)


def _rows(record: Json) -> Iterator[Json]:
    for section in record["suites"].values():
        yield from (row for row in section["rows"] if "digest" in row)


def _sections(cubin: bytes, name: re.Pattern[str]) -> dict[str, bytes]:
    return {x.name: x.data() for x in ELFFile(io.BytesIO(cubin)).iter_sections() if name.match(x.name)}


def _reads_variables(cubin: bytes) -> bool:
    """Their addresses lie in constant bank 4."""
    codes = disassemble(cubin).values()
    return any("c[0x4]" in instruction.text for code in codes for instruction in code.instructions)
