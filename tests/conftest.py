"""GPU tests are skipped, with the reason counted and shown, on a machine without a GPU."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    if reason:
        skip = pytest.mark.skip(reason=f"needs a GPU: {reason}")
        for item in on_gpu:
            item.add_marker(skip)
