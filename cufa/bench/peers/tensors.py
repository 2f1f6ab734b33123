"""CuPy arrays as torch tensors and back, over the same memory and on the same stream."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def missing(module: str, name: str = "") -> str:
    """A reason when a module cannot be found, else ""."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        found = False
    return "" if found else f"{name or module} is not installed"


def to_torch(x: Any) -> Any:
    """bfloat16 travels as its bits: not every DLPack on the way knows it."""
    import torch

    if str(x.dtype) == "bfloat16":
        return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(x)


def to_cupy(x: Any, dtype: Any) -> Any:
    import cupy
    import torch

    if x.dtype == torch.bfloat16:
        return cupy.from_dlpack(x.view(torch.int16)).view(dtype)
    return cupy.from_dlpack(x)


def on_cupys_stream(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` without gradients, on the stream that is CuPy's current one now: the current stream of each
    library is its own setting, and the benchmark runs on CuPy's."""
    import cupy
    import torch

    # ExternalStream(0) would not be the default stream but a new one, which nothing here waits for.
    address = cupy.cuda.get_current_stream().ptr
    stream = torch.cuda.ExternalStream(address) if address else torch.cuda.default_stream()

    def run() -> Any:
        with torch.cuda.stream(stream), torch.no_grad():
            return call()

    return run


def tried(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run``, after one call of it. Raises NotImplementedError with the library's own reason: libraries
    refuse what they do not serve by exceptions of all kinds."""
    import torch

    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NotImplementedError(lines[0] if lines else type(error).__name__) from error
    return run
