"""Compile-time choices of kernels: each folder's ``config.cuh`` against what Python gives it."""

from __future__ import annotations

import pytest

from cufa.build.compiler import choices, config_file
from cufa.build.static_compile import static_compile
from cufa.build.variants import variants
from cufa.gpu.architectures import ARCHITECTURES
from cufa.kernels import KERNELS

#: One kernel of each config.cuh.
DECLARED = {config: name for name in reversed(KERNELS) if (config := config_file(KERNELS[name].source))}


@pytest.mark.parametrize("kernel", DECLARED.values())
def test_python_has_a_value_of_the_declared_type_for_every_choice(kernel):
    declared = choices(config_file(KERNELS[kernel].source))
    assert declared
    constants = next(iter(variants([90], [kernel]))).constants
    for name, example in declared.items():
        assert isinstance(constants[name], bool) == (example in ("true", "false")), name


@pytest.mark.parametrize("kernel", DECLARED.values())
@pytest.mark.slow
def test_the_example_build_compiles(kernel, nvrtc):
    """Read alone, the file is a build: its values fit one another, and the shared memory that they need."""
    source = KERNELS[kernel].source
    declared = choices(config_file(source))
    example = {k: v == "true" if v in ("true", "false") else int(v) for k, v in declared.items()}
    report = static_compile(source, example, ARCHITECTURES[90])
    assert any(entry.registers > 32 for entry in report.entries)
