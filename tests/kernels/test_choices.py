"""Compile-time choices of kernels: each folder's ``config.cuh`` against what Python gives it."""

from __future__ import annotations

import pytest

from cufa.build.compiler import choices, config_file
from cufa.build.static_compile import static_compile
from cufa.build.variants import variants
from cufa.gpu.architectures import ARCHITECTURES
from cufa.kernels import KERNELS

#: One kernel of each source with a config.cuh.
DECLARED = {
    source: name for name in reversed(KERNELS) for source in KERNELS[name].sources if config_file(source)
}


@pytest.mark.parametrize(("source", "kernel"), DECLARED.items())
def test_python_has_a_value_of_the_declared_type_for_every_choice(source, kernel):
    declared = choices(config_file(source))
    assert declared
    constants = next(x for x in variants([90], [kernel]) if x.source == source).constants
    for name, example in declared.items():
        assert isinstance(constants[name], bool) == (example in ("true", "false")), name


@pytest.mark.parametrize("source", DECLARED)
@pytest.mark.slow
def test_the_example_build_compiles(source, nvrtc):
    """Read alone, the file is a build: its values fit one another, and the shared memory that they need."""
    declared = choices(config_file(source))
    example = {k: v == "true" if v in ("true", "false") else int(v) for k, v in declared.items()}
    report = static_compile(source, example, ARCHITECTURES[90])
    assert any(entry.registers > 32 for entry in report.entries)
