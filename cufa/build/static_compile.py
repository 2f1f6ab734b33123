"""Machine code without a GPU: NVRTC compiles for any architecture, no driver needed, and its log is read.

NVRTC is called through ``cuda.bindings`` with the very options of :func:`cufa.build.compiler.nvrtc_options`,
so that register counts are those of the kernel that runs. Notes in ptxas's log (a spill, a stack frame, an
instruction it ignored) become findings here.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..gpu.architectures import Architecture
from ..problem.checks import install
from .compiler import nvrtc_options, translation_unit

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(, used (?P<barriers>\d+) barriers)?")
_SHARED = re.compile(r"(\d+) bytes smem")
_WARNING = re.compile(r": warning #|^ptxas warning")

#: Messages of ptxas without the word warning: "(C7508) 'setmaxnreg' ignored", "(C7510) wgmma serialized",
#: ".minnctapersm will be ignored". Each one changes the kernel against its author's intent.
_PTXAS_TROUBLE = re.compile(r"\b(ignored|serialized)\b|^ptxas (warning|error|fatal)", re.IGNORECASE)


class MissingCompilerError(RuntimeError):
    """NVRTC, or the Python package that calls it, is not installed."""


class CompileError(RuntimeError):
    """NVRTC refused a translation unit. The message has NVRTC's words, the options and numbered source."""

    def __init__(self, log: str, unit: str, options: tuple[str, ...]) -> None:
        self.log, self.unit, self.options = log, unit, options
        source = "\n".join(f"{n:5} | {line}" for n, line in enumerate(unit.splitlines(), 1))
        super().__init__(
            f"NVRTC cannot compile this:\n{log.strip()}\noptions: {' '.join(options)}\ncufa.cu:\n{source}"
        )

    @property
    def summary(self) -> str:
        """The first error, on one line."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")


@dataclasses.dataclass(frozen=True)
class EntryReport:
    """ptxas's report on one ``extern "C"`` entry, with the functions that it calls."""

    name: str
    registers: int = 0
    """Per thread."""
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    """Local memory per thread: spilled registers, or an array indexed by a value known only at run time."""
    static_shared_bytes: int = 0
    barriers: int = 0
    """Named barriers reserved; 16 when an index is not a constant."""


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """One translation unit built for one architecture."""

    arch: str
    """As given to NVRTC, e.g. ``"sm_90a"``."""
    entries: tuple[EntryReport, ...]
    """In order of name."""
    log: str
    cubin: bytes = dataclasses.field(repr=False)
    seconds: float
    nvrtc: str
    """Version, ``"13.5"``."""
    ptx: str = dataclasses.field(default="", repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings in the log, from the front end and from ptxas."""
        return tuple(line.strip() for line in self.log.splitlines() if _WARNING.search(line))

    def entry(self, name: str) -> EntryReport:
        """Raises KeyError, naming the entries there are."""
        for found in self.entries:
            if found.name == name:
                return found
        raise KeyError(f"no entry {name!r}; compiled: {', '.join(e.name for e in self.entries)}")


def static_compile(
    source: str, constants: Mapping[str, int | bool], arch: Architecture, *, line_info: bool = False
) -> CompileReport:
    """Build ``cuda_src/<source>`` for one architecture and read what ptxas reports. ``line_info``: with the source
    line of each instruction, which changes none of them.

    Raises :class:`CompileError` when it does not compile, :class:`MissingCompilerError` without NVRTC.
    """
    return compile_text(translation_unit(source, constants), arch, line_info=line_info)


def compile_text(unit: str, arch: Architecture, *, line_info: bool = False) -> CompileReport:
    """:func:`static_compile` for a translation unit as text, which includes files of
    :data:`~cufa.build.compiler.SOURCE_DIR`."""
    nvrtc = _load_nvrtc()
    options = (*nvrtc_options(arch.nvrtc_name), *(["-lineinfo"] if line_info else []))
    start = time.perf_counter()
    log, cubin, ptx = _compile(nvrtc, unit, options)
    seconds = time.perf_counter() - start
    return CompileReport(arch.nvrtc_name, parse_log(log), log, cubin, seconds, _version(nvrtc), ptx)


def check_report(report: CompileReport, *, spills_up_to: float = 0) -> tuple[str, ...]:
    """Findings that must not ship, one sentence each: spill stores of more than ``spills_up_to`` bytes per thread,
    local memory, and instructions that ptxas ignores or serialises, with or without a message."""
    findings = []
    for e in report.entries:
        if e.spill_store_bytes or e.spill_load_bytes:
            if e.spill_store_bytes <= spills_up_to:
                continue
            findings.append(
                f"{e.name}: spills, {e.spill_store_bytes} bytes stored and {e.spill_load_bytes} loaded "
                f"a thread at {e.registers} registers"
            )
        elif e.stack_bytes:
            findings.append(f"{e.name}: {e.stack_bytes} bytes of local memory per thread (a stack frame)")
    findings += [line.strip() for line in report.log.splitlines() if _PTXAS_TROUBLE.search(line)]
    products, fences = warpgroup_instructions(report.cubin) if report.arch == "sm_90a" else (0, 0)
    if 2 * fences > products > 0:
        findings.append(
            f"wgmma: products are serialised without a message: {products} products have {fences} fences"
        )
    return tuple(findings)


def warpgroup_instructions(cubin: bytes) -> tuple[int, int]:
    """Products of wgmma in machine code for sm_90a, and fences before them (HGMMA, WARPGROUP.ARRIVE). ptxas emits one
    fence for a batch of products; if registers do not suffice, a fence and a wait for each product."""
    products = fences = 0
    for code in executable(cubin):
        # An instruction has 16 bytes; its lowest 12 bits are the opcode. HGMMA has two opcodes: A in shared memory, or
        # in registers. In WARPGROUP instructions bit 47 means a wait for products (WARPGROUP.DEPBAR).
        words = np.frombuffer(code, dtype="<u8")[::2]
        products += int(np.isin(words & 0xFFF, (0x9F0, 0xDF0)).sum())
        fences += int((words & (1 << 47 | 0xFFF) == 0x9C5).sum())
    return products, fences


def executable(cubin: bytes) -> Iterator[bytes]:
    """Sections of an ELF file that hold instructions."""
    if not cubin:
        return
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    for place in range(table, table + size * count, size):
        flags, _, offset, length = struct.unpack_from("<QQQQ", cubin, place + 8)
        if flags & 4:
            yield cubin[offset : offset + length]


def parse_log(log: str) -> tuple[EntryReport, ...]:
    """Read a ``--ptxas-options=-v`` log. Functions that ptxas did not inline count towards the entry that
    precedes them: their spills are its spills."""
    entries: list[EntryReport] = []
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entries.append(EntryReport(match["name"]))
        elif not entries:
            continue
        elif match := _STACK.search(line):
            entries[-1] = dataclasses.replace(
                entries[-1],
                stack_bytes=entries[-1].stack_bytes + int(match["stack"]),
                spill_store_bytes=entries[-1].spill_store_bytes + int(match["stores"]),
                spill_load_bytes=entries[-1].spill_load_bytes + int(match["loads"]),
            )
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            entries[-1] = dataclasses.replace(
                entries[-1],
                registers=int(match["registers"]),
                barriers=int(match["barriers"] or 0),
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
    return tuple(sorted(entries, key=lambda entry: entry.name))


def nvrtc_version() -> str:
    """Raises :class:`MissingCompilerError` without NVRTC."""
    return _version(_load_nvrtc())


def _load_nvrtc() -> Any:
    advice = f"install it with: {install('cuda13')} (no GPU or driver is needed to compile)"
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingCompilerError(
            f"the package cuda-bindings is not installed ({error}); {advice}"
        ) from error
    try:
        _version(nvrtc)
    except Exception as error:  # cuda-pathfinder has its own exception types for a library not found
        raise MissingCompilerError(f"the NVRTC library was not found ({error}); {advice}") from error
    return nvrtc


def _version(nvrtc: Any) -> str:
    major, minor = _check(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def _compile(nvrtc: Any, unit: str, options: tuple[str, ...]) -> tuple[str, bytes, str]:
    """Log, cubin and PTX. The cubin is ELF and may hold anything, so it is never treated as text."""
    (program,) = _check(nvrtc, nvrtc.nvrtcCreateProgram(unit.encode(), b"cufa.cu", 0, [], []))
    try:
        flags = [option.encode() for option in (*options, "--ptxas-options=-v")]
        (status, *_) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _got(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise CompileError(log, unit, options)
        _check(nvrtc, (status,))
        ptx = _got(nvrtc, program, "PTX").rstrip(b"\0").decode(errors="replace")
        return log, _got(nvrtc, program, "CUBIN"), ptx
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _got(nvrtc: Any, program: Any, what: str) -> bytes:
    """The program's "ProgramLog", "PTX" or "CUBIN"."""
    (size,) = _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    content = bytearray(size)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, content))
    return bytes(content)


def _check(nvrtc: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {status!r}")
    return tuple(values)
