"""CuPy arrays as torch tensors and back, over the same memory and on the same stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Runs = tuple[Callable[[], Any], Callable[[], dict[str, Any]]]
"""A function that launches, and a function that computes once and returns arrays by role."""

NOT_DETERMINISTIC = "torch sets determinism for the whole process, which a benchmark does not change"


def to_torch(x: Any) -> Any:
    """bfloat16 is passed as int16, because not every DLPack implementation has bfloat16."""
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


def runs(
    attention: Callable[[Any, Any, Any], Any],
    arrays: Mapping[str, Any],
    layout: Callable[[Any], Any] = lambda x: x,
) -> Runs:
    """The timed call, and the function that returns its results.

    ``attention`` takes q, k and v as torch tensors; ``layout`` converts cufa's axis order to that of ``attention``, and
    results back. If ``arrays`` has dout, the timed call is autograd's backward: the forward has run once, before.
    """
    import torch

    q, k, v = (layout(to_torch(arrays[name])) for name in "qkv")
    dtype = arrays["q"].dtype
    if "dout" not in arrays:
        run = tried(on_cupys_stream(lambda: attention(q, k, v)))
        return run, lambda: {"o": to_cupy(layout(run()), dtype)}
    dout, inputs = layout(to_torch(arrays["dout"])), [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        with torch.enable_grad():
            return attention(*inputs)

    out = tried(on_cupys_stream(forward))()
    run = tried(on_cupys_stream(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)))
    return run, lambda: {
        name: to_cupy(layout(x), dtype) for name, x in zip(("dq", "dk", "dv"), run(), strict=True)
    }


def on_cupys_stream(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` on CuPy's current stream, on which the benchmark takes times: torch has a current stream of its own.
    Gradients are off unless ``call`` enables them."""
    import cupy
    import torch

    # ExternalStream(0) would be a new stream, for which nothing here waits, not the default stream.
    address = cupy.cuda.get_current_stream().ptr
    stream = torch.cuda.ExternalStream(address) if address else torch.cuda.default_stream()

    def run() -> Any:
        with torch.cuda.stream(stream), torch.no_grad():
            return call()

    return run


def tried(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run``, after one trial call. Raises NotImplementedError with the library's reason: libraries raise exceptions
    of all kinds for problems that they do not serve."""
    import torch

    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NotImplementedError(lines[0] if lines else type(error).__name__) from error
    return run
