"""What a machine lacks is no failure: tests that need a GPU, or a C++ compiler to execute kernels on the CPU,
are skipped, with the reason counted and shown."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def why_no_gpu() -> str | None:
    """None when kernels can run here."""
    try:
        from cufa.backends import cuda
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    if cuda.device_count() == 0:
        return "CuPy sees no NVIDIA GPU"
    try:
        cuda.current_device()
    except ValueError as error:
        return str(error)
    return None


def why_no_compiler() -> str | None:
    """None when kernels can be compiled for execution on this CPU."""
    from cufa.executor import build as host_build

    try:
        host_build.cxx()
    except host_build.CompilerError:
        return "needs a C++ compiler: apt-get install g++"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    _skip(on_gpu, f"needs a GPU: {why_no_gpu()}" if on_gpu and why_no_gpu() else None)
    _skip([item for item in items if item.path.name.startswith("test_emulate")], why_no_compiler())


def _skip(items: list[pytest.Item], reason: str | None) -> None:
    for item in items if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
