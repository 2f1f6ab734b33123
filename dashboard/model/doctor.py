"""`cufa doctor` in a process of its own: a broken installation may crash the process, and the GPU is the worker's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cufa
from cufa.cache import runs_dir
from cufa.doctor import Check, Status

_PATIENCE_SECONDS = 120


def examine() -> list[Check]:
    """All checks, and whether runs can be saved. Never raises."""
    return [*_doctor(), _runs()]


def _doctor() -> list[Check]:
    paths = [str(Path(cufa.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "cufa", "doctor", "--json"]
    fix = "run `cufa doctor` in a terminal"
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
        report = json.loads(answer.stdout)
        return [Check(c["name"], Status(c["status"]), c["detail"], c["fix"]) for c in report]
    except subprocess.TimeoutExpired:
        return [Check("doctor", Status.PROBLEM, f"no answer in {_PATIENCE_SECONDS} s", fix)]
    except (OSError, ValueError, KeyError, TypeError):
        message = answer.stderr.strip()[-800:] if "answer" in locals() else ""
        code = answer.returncode if "answer" in locals() else "none"
        return [Check("doctor", Status.PROBLEM, f"it died (exit code {code}): {message}", fix)]


def _runs() -> Check:
    """Whether the dashboard can save runs."""
    folder = runs_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b" " * 4096)
        probe.unlink()
    except OSError as error:
        fix = "make it writable or make room, or set CUFA_RUNS_DIR to another folder"
        return Check("runs", Status.PROBLEM, f"{folder} cannot be written: {error.strerror or error}", fix)
    return Check("runs", Status.OK, f"saved in {folder}")


def as_text(checks: list[Check]) -> str:
    """The checks as text, for a bug report."""
    return "\n".join(
        f"{c.name:<14} {c.status:<8} {c.detail}" + (f"\n{'':<14} fix      {c.fix}" if c.fix else "")
        for c in checks
    )
