"""Reading SASS: NVIDIA's disassembler run on a cubin, its line table and its live registers put together."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .flow import Jump, loops_of
from .machine_code import Code, Instruction, Place, kind_of
from .ptx import parse_ptx, relative_place
from .static_compile import static_compile
from .variants import Variant

#: Installs the disassembler: 6 MB, without a CUDA toolkit or a GPU.
ADVICE = "pip install nvidia-cuda-nvdisasm"

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)|inlined at "([^"]+)", line (\d+)')
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;\s*(?://.*)?$")
_LIVE = re.compile(r"//\s*\|\s*(\d+)?\s*\|")
_JUMP = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")
_END = re.compile(r"(EXIT|RET|BRX|JMX|KILL)\b")
_TIMEOUT = 300

_KINDS = (
    ("tensor", re.compile(r"[HIDQ]G?MMA|UTC\w*MMA")),
    ("exp", re.compile(r"MUFU\.EX2")),
    ("wait", re.compile(r"BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPGROUP|WARPSYNC|MEMBAR|FENCE|NANOSLEEP|ERRBAR|ELECT|ACQBULK"
                        r"|USETMAXREG|CGAERRBAR|UCGABAR|PREEXIT|YIELD")),
    ("shared", re.compile(r"LDS|STS|LDSM|STSM|ATOMS|LDTM|STTM")),
    ("copy", re.compile(r"LDGSTS|UTMA|UBLKCP|UBLKRED|UTMAREDG")),
    ("spill", re.compile(r"LDL|STL")),
    ("global", re.compile(r"LDG|STG|ATOMG?\b|ATOM\.|REDG?\b|RED\.|LD\.|ST\.|CCTL|UBLKPF")),
    ("branch", re.compile(r"BRA|BRX|JMP|EXIT|CALL|RET|BSSY|BSYNC|BREAK|BMOV|KILL|RTT|BPT")),
    ("float", re.compile(r"F(FMA|MUL|ADD|MNMX|SEL|SET|SETP|CHK|RND|SWZ)|MUFU|H(FMA2|MUL2|ADD2|MNMX2|SET2|SETP2)|F2FP?\b"
                         r"|F2F|I2F|F2I|D(FMA|MUL|ADD|SETP)")),
)  # fmt: skip


class MissingDisassemblerError(RuntimeError):
    """nvdisasm is not installed."""


@functools.cache
def find_nvdisasm() -> str | None:
    """The file nvdisasm: in NVIDIA's Python packages, or on the path."""
    spec = importlib.util.find_spec("nvidia")
    for root in () if spec is None else spec.submodule_search_locations or ():
        tools = sorted(Path(root).glob("*/bin/nvdisasm"), reverse=True)
        if tools:
            return str(tools[0])
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> dict[str, Code]:
    """The entries of a cubin by name; with source lines where it was compiled with ``-lineinfo``.

    Raises :class:`MissingDisassemblerError` without nvdisasm, RuntimeError where it fails.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise MissingDisassemblerError(f"nvdisasm, which shows SASS, is not installed: {ADVICE}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        # One run prints either line numbers or live registers.
        lines, live = (_run([tool, "-c", *x, str(file)]) for x in (("-gi",), ("-lrm", "count")))
    return parse_sass(lines, live)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {(done.stderr or done.stdout).strip()[:400]}")
    return done.stdout


def parse_sass(with_lines: str, with_live: str = "") -> dict[str, Code]:
    """The entries in the output of ``nvdisasm -c -gi`` and ``nvdisasm -c -lrm count``."""
    live = _live_registers(with_live)
    codes: dict[str, Code] = {}
    for name, body in _sections(with_lines).items():
        codes[name] = _entry(name, body, live)
    return codes


def _sections(text: str) -> dict[str, list[str]]:
    """Lines of each kernel's code."""
    sections: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if section := _SECTION.match(line):
            name = section[1]
            sections[name] = []
        elif name:
            sections[name].append(line)
    return sections


def _live_registers(text: str) -> dict[tuple[str, str], int]:
    """General registers by kernel and offset."""
    counts = {}
    for name, body in _sections(text).items():
        for line in body:
            code, _, columns = line.partition(";")
            offset = re.match(r"\s+/\*([0-9a-f]{4,})\*/", code)
            count = _LIVE.search(columns)
            if offset and count:
                counts[name, offset[1]] = int(count[1] or 0)
    return counts


def _entry(name: str, body: list[str], live: dict[tuple[str, str], int]) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    here: tuple[Place, ...] = ()
    is_first = True  # of the lines that locate the next instructions
    for line in body:
        if "//## File" in line:
            if is_first:  # the innermost line; the lines after it are where it was inlined
                here = ()
            here = here + tuple(p for p in _places(line) if p not in here)
            is_first = False
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            is_first = True
            text = match["text"]
            if jump := _JUMP.search(text):
                jumps.append((len(instructions), jump[1]))
            instructions.append(
                Instruction(text, kind_of(text, _KINDS), here, live.get((name, match["offset"])))
            )
    while instructions and instructions[-1].text == "NOP":  # padding of the section
        instructions.pop()
    last = len(instructions) - 1
    if (
        jumps and jumps[-1][0] == last and labels.get(jumps[-1][1]) == last
    ):  # an endless loop that is never reached
        instructions.pop()
        jumps.pop()
    found_jumps = [Jump(n, labels.get(label), instructions[n].text.startswith("BRA `")) for n, label in jumps]
    found_jumps += [Jump(n, None, always=True) for n, i in enumerate(instructions) if _END.match(i.text)]
    return Code(tuple(instructions), loops_of(len(instructions), found_jumps))


def _places(line: str) -> list[Place]:
    return [
        Place(relative_place(file or outer), int(number or outer_number))
        for file, number, outer, outer_number in _PLACE.findall(line)
    ]


@dataclasses.dataclass(frozen=True)
class Listing:
    """The code of one build, as it runs: line numbers change no instruction."""

    ptx: Mapping[str, Code]
    """By kernel entry, for the entries that the build launches."""
    sass: Mapping[str, Code]
    """By kernel entry; empty without a disassembler."""
    missing: str | None
    """Why there is no SASS, and what to install."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ptx": {name: code.as_json() for name, code in self.ptx.items()},
            "sass": {name: code.as_json() for name, code in self.sass.items()},
            "missing": self.missing,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Listing:
        """Raises KeyError, TypeError, IndexError or ValueError for what :meth:`as_json` did not write."""
        ptx, found = (
            {name: Code.from_json(code) for name, code in content[kind].items()} for kind in ("ptx", "sass")
        )
        return cls(ptx, found, content["missing"])


def listing(variant: Variant) -> Listing:
    """Compile a variant with line numbers and take it apart.

    Raises :class:`~cufa.build.static_compile.CompileError` where it does not compile, and
    :class:`~cufa.build.static_compile.MissingCompilerError` without NVRTC.
    """
    report = static_compile(variant.source, variant.constants, variant.arch, line_info=True)
    try:
        sass, missing = disassemble(report.cubin), None
    except MissingDisassemblerError as error:
        sass, missing = {}, str(error)
    launched = {x.entry for x in variant.launches}  # the file may define entries for other problems
    ptx = parse_ptx(report.ptx)
    return Listing(
        {name: code for name, code in ptx.items() if name in launched},
        {name: code for name, code in sass.items() if name in launched},
        missing,
    )
