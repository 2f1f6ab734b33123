"""Who may import whom: the rooms of cufa, from the bottom up, and what each may import besides itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import cufa

ROOT = Path(cufa.__file__).parent

BASE = {"problem", "gpu", "cache", "__version__"}
PLANNING = BASE | {"schedule", "kernels", "plan"}
RUNNING = PLANNING | {"build", "run", "run.cpu", "run.cuda"}
CALLING = RUNNING | {"masks", "calls", "reference"}
MEASURING = CALLING | {"run.emulate", "measure"}

ROOMS: dict[str, set[str]] = {
    "problem": set(),
    "gpu": set(),
    "cache": set(),
    "__version__": set(),
    "schedule": BASE,
    "kernels": BASE | {"schedule"},
    "plan": BASE | {"schedule", "kernels"},
    "build": PLANNING,
    "run": PLANNING,
    "run.cpu": PLANNING | {"run"},
    "run.cuda": PLANNING | {"build", "run"},
    "masks": RUNNING,
    "calls": RUNNING,
    "reference": CALLING,
    "run.emulate": CALLING,
    "measure": MEASURING,
    "parallel": CALLING,
    "train": CALLING,
    "doctor": CALLING | {"run.emulate"},
    "torch": CALLING,
    "jax": CALLING,
    "examples": CALLING | {"torch", "jax", "train", "__init__"},
    "__init__": MEASURING,
}
"""Commands and the modules that start them import everything."""

STARTERS = {"commands", "cli", "streams", "__main__"}


def room(parts: tuple[str, ...]) -> str:
    """The room of a module, by its dotted path below cufa."""
    return (
        ".".join(parts[:2])
        if parts[0] == "run" and parts[1:2] in (("cpu",), ("cuda",), ("emulate",))
        else parts[0]
    )


def imported(file: Path) -> set[tuple[str, ...]]:
    """The modules of cufa and of the dashboard that a file imports, wherever in the file; paths below cufa."""
    package = file.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(x.name.split(".")[1:]) for x in node.names if x.name.startswith("cufa.")}
            assert not any(x.name.split(".")[0] == "dashboard" for x in node.names), file
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = (*base, *node.module.split(".")) if node.module else base
            found |= {module} if node.module else {(*base, x.name) for x in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            top, *rest = node.module.split(".")
            assert top != "dashboard", file
            if top == "cufa":
                found |= {tuple(rest)} if rest else {(x.name,) for x in node.names}
    return {path for path in found if path}


FILES = sorted(
    path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("cuda_src", "dashboard")
)


def test_imports_go_downward():
    wrong = [
        f"{file.relative_to(ROOT)} imports {'.'.join(path)}"
        for file in FILES
        if (own := room(file.relative_to(ROOT).with_suffix("").parts)) not in STARTERS
        for path in imported(file)
        if (other := room(path)) != own and other not in ROOMS[own]
    ]
    assert wrong == []


def test_the_table_is_an_order():
    """Nothing that a room may import may import the room."""
    for name, allowed in ROOMS.items():
        for other in allowed - {name}:
            assert name not in ROOMS.get(other, set()), (name, other)


def test_a_plan_passes_at_most_20_files():
    """The walk of a call without its launch. A budget, as for lines: a longer walk needs a reason."""
    cufa.plan((1, 8, 128, 64), device="sm_90")  # what happens once: imports, files that are read
    passed = set()

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            passed.add(str(file.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        cufa.plan((1, 8, 1024, 128), causal=True, device="sm_90")
    finally:
        sys.setprofile(None)
    assert len(passed) <= 20, sorted(passed)
