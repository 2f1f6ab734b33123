"""A kernel read by the system's C++ compiler, as an editor reads it, in a twentieth of the time that NVRTC takes."""

from __future__ import annotations

import subprocess

import pytest
from conftest import why_no_compiler

from cufa.build import compiler
from cufa.run.emulate import build as host_build


def errors(unit: str) -> str:
    """What the compiler says of a translation unit: "" if all its types and static_asserts are right. Skips the test
    where there is no compiler."""
    if reason := why_no_compiler():
        pytest.skip(reason)
    command = [
        host_build.cxx(), "-std=c++17", "-w", "-fsyntax-only", f"-I{compiler.SOURCE_DIR}", "-x", "c++", "-",
    ]  # fmt: skip
    done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
    assert bool(done.stderr) == bool(done.returncode), done.stderr
    return done.stderr
