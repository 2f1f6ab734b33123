"""Reading PTX: instructions of each kernel entry, with the source lines that ``.loc`` gives them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from .compiler import SOURCE_DIR
from .flow import Jump, loops_of
from .machine_code import Code, Instruction, Place, kind_of

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOC = re.compile(
    r"\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+(?P<column>\d+)"
    r"(?:,\s*function_name\s+\S+,\s*inlined_at\s+(?P<at_file>\d+)\s+(?P<at_line>\d+)\s+(?P<at_column>\d+))?"
)
_LABEL = re.compile(r"(\$?\w+):(?!:)")
_JUMP = re.compile(r"\bbra(?:\.uni)?\s+(\$?\w+)")

_KINDS = (
    ("tensor", re.compile(r"mma\.sync|wgmma\.mma_async|mma\.m\d")),
    ("wait", re.compile(r"bar|mbarrier|fence|membar|wgmma\.|cp\.async\.(wait|commit|bulk\.(wait|commit))|griddep"
                        r"|nanosleep|elect|activemask|setmaxnreg")),
    ("copy", re.compile(r"cp\.(async|reduce)")),
    ("exp", re.compile(r"ex2\.")),
    ("shared", re.compile(r"(ld|st|atom|red)(\.volatile|\.relaxed|\.\w+)*\.shared|ldmatrix|stmatrix")),
    ("spill", re.compile(r"(ld|st)\.local")),
    ("global", re.compile(r"(ld|st|atom|red|prefetch)(\.volatile|\.relaxed|\.\w+)*\.global|prefetch|(ld|st)\.v\d")),
    ("branch", re.compile(r"bra|ret|exit|call|trap|brx")),
    ("float", re.compile(r"(?!mov|ld|st|cvt\.[us]|selp|setp\.\w+\.[us])\S*\.(f16|f32|f64|bf16|f16x2|bf16x2|tf32)")),
)  # fmt: skip


_SPLIT = re.compile(r"setmaxnreg\.(?:inc|dec)\S*\s+(\d+)")


def register_splits(text: str) -> dict[str, tuple[int, ...]]:
    """By entry: the registers per thread that its warpgroups set at their begin (``setmaxnreg``), ascending; empty if
    none sets any."""
    return {name: tuple(sorted({int(n) for n in _SPLIT.findall(body)})) for name, body in _bodies(text)}


def parse_ptx(text: str) -> dict[str, Code]:
    """The entries of a PTX module by name."""
    files = {int(number): relative_place(path) for number, path in _FILE.findall(text)}
    return {name: _entry(body, files) for name, body in _bodies(text)}


def _bodies(text: str) -> Iterator[tuple[str, str]]:
    """Name of each entry, and its text after the opening brace."""
    starts = [*_ENTRY.finditer(text), None]
    for start, after in itertools.pairwise(starts):
        assert start is not None
        yield start[1], text[text.index("{", start.end()) + 1 : after.start() if after else len(text)]


@functools.lru_cache(256)  # tens of thousands of instructions name the same few files
def relative_place(path: str) -> str:
    """The path relative to ``cuda_src``; of a file elsewhere, its name."""
    where = Path(path)
    return str(where.relative_to(SOURCE_DIR)) if where.is_relative_to(SOURCE_DIR) else where.name


def _entry(body: str, files: dict[int, str]) -> Code:
    instructions: list[Instruction] = []
    scopes, opened = [0], 0  # ids of the open scopes: a label is visible within its scope
    labels: dict[tuple[int, str], int] = {}
    jumps: list[tuple[int, str, tuple[int, ...]]] = []  # to labels, which may come later
    chains: dict[tuple[int, int, int], tuple[Place, ...]] = {}
    here: tuple[Place, ...] = ()
    for statement in _statements(body):
        if statement == "{":
            opened += 1
            scopes.append(opened)
        elif statement == "}":
            scopes = scopes[:-1] or [0]
        elif found := _LOC.match(statement):
            here = _chain(found, files, chains)
        elif found := _LABEL.fullmatch(statement):
            labels[scopes[-1], found[1]] = len(instructions)
        elif not statement.startswith("."):
            if jump := _JUMP.search(statement):
                jumps.append((len(instructions), jump[1], tuple(scopes)))
            instructions.append(Instruction(statement, kind_of(statement, _KINDS), here))
    found_jumps = [
        Jump(
            index,
            next((labels[scope, name] for scope in reversed(within) if (scope, name) in labels), None),
            not instructions[index].text.startswith("@"),
        )
        for index, name, within in jumps
    ]
    ends = [n for n, i in enumerate(instructions) if i.text in ("ret", "exit", "trap")]
    found_jumps += [Jump(n, None, always=True) for n in ends]
    return Code(tuple(instructions), loops_of(len(instructions), found_jumps))


def _statements(body: str) -> Iterator[str]:
    """Instructions, labels, directives and the braces of scopes, without comments and semicolons."""
    pending = ""
    for raw in body.splitlines():
        rest = raw.partition("//")[0].strip()
        while rest:
            label = _LABEL.match(rest)
            if not pending and (rest[0] in "{}" or label):
                length = 1 if label is None else label.end()
                yield rest[:length]
                rest = rest[length:].lstrip()
                continue
            text, semicolon, after = rest.partition(";")
            pending = " ".join(f"{pending} {text}".split())
            if semicolon or pending.startswith("."):
                yield pending
                pending = ""
            rest = after.strip() if semicolon else ""


def _chain(
    loc: re.Match[str], files: dict[int, str], chains: dict[tuple[int, int, int], tuple[Place, ...]]
) -> tuple[Place, ...]:
    """The place of a line and the places that it was inlined into, whose chains come earlier in the text."""
    file, line, column = int(loc["file"]), int(loc["line"]), int(loc["column"])
    if not line:  # code that the compiler added
        return ()
    outer: tuple[Place, ...] = ()
    if loc["at_file"]:
        at = int(loc["at_file"]), int(loc["at_line"]), int(loc["at_column"])
        outer = chains.get(at) or (Place(files.get(at[0], "?"), at[1]),)
    chains[file, line, column] = (Place(files.get(file, "?"), line), *outer)
    return chains[file, line, column]
