"""The size budget: `make size` prints what the house measures beside its budget.

A measure over its budget fails if it also exceeds its ceiling, the figure of 2026-11-28: the house may only shrink
towards its budget. Lines count as they stand in tracked files; a wheel's recorded data counts compressed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = (".py", ".cu", ".cuh", ".h", ".cpp", ".js", ".css")
PRODUCT = ("cufa", "cuda_src", "dashboard")
KERNELS = {
    "forward/fa3/kernel.cu": 2500,
    "forward/fa2/kernel.cu": 1900,
    "backward/fa3_narrow64/kernel.cu": 3000,
    "backward/fa3_narrow128/kernel.cu": 3000,
    "backward/fa3_pair/kernel.cu": 3000,
    "backward/fa2/kernel.cu": 3000,
    "backward/fa2_f32/kernel.cu": 3000,
    "decode/split.cu": 3000,
    "decode/balanced.cu": 3000,
}
HEADER_LINES, LINE_LENGTH, STAMPS = 45, 130, 60
ADDED = {
    "the first hour (cufa.torch, cufa.jax, examples, ahead of time)": 1_200,
    "sound": 600,
    "dashboard for engineers and learners": 1_500,
    "fp8": 1_500,
    "everything with everything": 3_500,
    "decoding and serving": 2_000,
    "several GPUs": 2_500,
}
"""Lines by which later capabilities raise the budgets of the product and of cufa."""
RECORDED = "cufa/records"
CEILINGS = {
    "lines of the product": 76_027,
    "lines of cufa": 36_546,
    "lines of tests": 44_341,
    "lines of forward/fa3/kernel.cu with its includes": 4_690,
    "lines of forward/fa2/kernel.cu with its includes": 3_380,
    "lines of backward/fa3_narrow64/kernel.cu with its includes": 5_308,
    "lines of backward/fa3_narrow128/kernel.cu with its includes": 5_287,
    "lines of backward/fa3_pair/kernel.cu with its includes": 4_977,
    "lines of backward/fa2/kernel.cu with its includes": 4_064,
    "lines of backward/fa2_f32/kernel.cu with its includes": 3_889,
    "lines of decode/split.cu with its includes": 3_644,
    "lines of decode/balanced.cu with its includes": 3_635,
}
"""By what is measured."""
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_STAMP = re.compile(r"\bINSIDE\(")


def main() -> int:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in tracked if name.endswith(CODE)}
    measured = [*_lines(texts), *_closures(), *_kernel_files(texts), _recorded(tracked)]
    grown = False
    for what, size, budget in measured:
        ceiling = max(budget, CEILINGS.get(what.partition(",")[0], 0))
        grown |= size > ceiling
        verdict = "GROWN" if size > ceiling else "over" if size > budget else "ok"
        print(f"{verdict:6}{size:>9,} of {budget:>9,}  {what}")
    return grown


def _lines(texts: dict[str, str]) -> list[tuple[str, int, int]]:
    """Lines of code of the product, of its package and of the tests."""

    def lines(*folders: str) -> int:
        return sum(text.count("\n") for name, text in texts.items() if name.startswith(folders))

    return [
        ("lines of the product", lines(*(f"{x}/" for x in PRODUCT)), 50_500 + sum(ADDED.values())),
        ("lines of cufa", lines("cufa/"), 21_500 + sum(ADDED.values())),
        ("lines of tests", lines("tests/"), 30_500),
    ]


def closure(kernel: str) -> list[str]:
    """A kernel's file and all that it includes, without the twins for the CPU (``host/``)."""
    found: list[str] = []
    pending = [kernel]
    while pending:
        name = pending.pop()
        if name in found or name.startswith("host/"):
            continue
        found.append(name)
        pending += _INCLUDE.findall((ROOT / "cuda_src" / name).read_text(encoding="utf-8"))
    return found


def _closures() -> list[tuple[str, int, int]]:
    def lines(kernel: str) -> int:
        files = (ROOT / "cuda_src" / name for name in closure(kernel))
        return sum(path.read_text(encoding="utf-8").count("\n") for path in files)

    return [(f"lines of {kernel} with its includes", lines(kernel), most) for kernel, most in KERNELS.items()]


def _kernel_files(texts: dict[str, str]) -> list[tuple[str, int, int]]:
    """Headers, lines that are too long, and stamps of the in-block trace."""
    device = {name: text for name, text in texts.items() if name.startswith("cuda_src/")}
    longest_header = max(device, key=lambda name: _header(device[name]))
    widest = max(device, key=lambda name: _widest(device[name]))
    stamps = sum(len(_STAMP.findall(text)) for name, text in device.items() if "/host/" not in name)
    return [
        (f"lines of the longest header, {longest_header}", _header(device[longest_header]), HEADER_LINES),
        (f"columns of the longest line, {widest}", _widest(device[widest]), LINE_LENGTH),
        ("stamps of the in-block trace", stamps, STAMPS),
    ]


def _header(text: str) -> int:
    lines = text.splitlines()
    return next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))


def _widest(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


def _recorded(tracked: list[str]) -> tuple[str, int, int]:
    """Bytes, compressed as in a wheel."""
    files = [ROOT / name for name in tracked if name.startswith(f"{RECORDED}/")]
    size = sum(len(zlib.compress(path.read_bytes())) for path in files)
    return "bytes of recorded data, compressed", size, 800_000


if __name__ == "__main__":
    sys.exit(main())
