"""Compile-time choices of kernels: each folder's ``config.cuh`` against what Python gives it."""

from __future__ import annotations

import re

import pytest
import syntax

from cufa.build.compiler import SOURCE_DIR, choices, config_file
from cufa.build.variants import variants
from cufa.kernels import KERNELS

#: One kernel of each source with a config.cuh.
DECLARED = {
    source: name for name in reversed(KERNELS) for source in KERNELS[name].sources if config_file(source)
}


@pytest.mark.parametrize(("source", "kernel"), DECLARED.items())
def test_python_has_a_value_of_the_declared_type_for_every_choice(source, kernel):
    declared = choices(config_file(source))
    assert declared
    builds = variants([90], [kernel], everything=True)
    constants = next(x for x in builds if x.source == source).constants
    for name, example in declared.items():
        assert isinstance(constants[name], bool) == (example in ("true", "false")), name


@pytest.mark.parametrize("source", DECLARED)
def test_the_example_build_is_a_build(source):
    """Read alone, the file is a build: its values fit one another, and the shared memory that they need."""
    assert syntax.errors(f'#include "{source}"\n') == ""


def test_no_builtin_of_one_compiler():
    """The oldest NVRTC that cufa serves (12.9, 13.0) lacks some builtins of newer ones."""
    for path in sorted(SOURCE_DIR.rglob("*.cu*")):
        code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        assert "__builtin_" not in code, f"{path}: NVRTC 13.0 refuses __builtin_offsetof; use OFFSET_OF"
