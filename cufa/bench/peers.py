"""Other libraries, timed on the same arrays in the same run. Torch is used when there, never required."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from ..core.problem import Problem
from .timing import Timing

#: Backends of torch.nn.functional.scaled_dot_product_attention, by our name for them.
TORCH_BACKENDS = {
    "torch flash": "FLASH_ATTENTION",
    "torch cudnn": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
    "torch math": "MATH",
}
PEERS = tuple(TORCH_BACKENDS)

#: Backends that know the causal mask aligned bottom-right; for the others torch would materialise it.
_LOWER_RIGHT = ("torch flash", "torch efficient")

#: Materialises the scores: above this it would not fit, or take minutes.
_MATH_MAX_BYTES = 16 << 30


def torch_available() -> bool:
    """Installed; whether it sees the GPU shows when it is asked to run."""
    return importlib.util.find_spec("torch") is not None


def torch_peer(
    name: str, problem: Problem, q: Any, k: Any, v: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(run, result) for one SDPA backend on the CuPy arrays q, k, v, (batch, heads, seqlen, head_dim),
    shared without a copy. ``run`` launches on CuPy's current stream; ``result`` computes once and returns a
    CuPy array.

    Raises NotImplementedError, with torch's reason, when the backend does not serve the problem.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if _is_uneven(problem) and name not in _LOWER_RIGHT:
        raise NotImplementedError(
            "torch aligns this backend's causal mask top-left: not the same computation"
        )
    scores = 6 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    if name == "torch math" and scores > _MATH_MAX_BYTES:
        raise NotImplementedError("materialises its scores: too large")
    tensors = [_to_torch(x) for x in (q, k, v)]
    backend = getattr(SDPBackend, TORCH_BACKENDS[name])
    options: dict[str, Any] = {"scale": problem.scale, **_mask(problem)}
    if problem.group_size > 1:
        options["enable_gqa"] = True
    # "highest": float32 products stay float32. The tf32 problem opts in.
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"

    import cupy

    # The current stream of each library is its own setting; the benchmark runs on CuPy's. (ExternalStream(0)
    # would not be the default stream but a new one, which nothing here waits for.)
    address = cupy.cuda.get_current_stream().ptr
    stream = torch.cuda.ExternalStream(address) if address else torch.cuda.default_stream()

    def run() -> Any:
        with torch.cuda.stream(stream), torch.no_grad(), sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    try:
        run()
        torch.cuda.synchronize()
    except RuntimeError as error:  # "No available kernel"; the reasons came as warnings
        raise NotImplementedError(str(error).splitlines()[0]) from error
    return run, lambda: _to_cupy(run(), q.dtype)


def _is_uneven(problem: Problem) -> bool:
    """Causal, and the two alignments of the mask differ."""
    return problem.causal and problem.seqlen_q != problem.seqlen_k


def _mask(problem: Problem) -> dict[str, Any]:
    """Arguments of SDPA. ``is_causal`` aligns top-left; bottom-right is a bias that torch hands on to the
    backend as a flag, without making a matrix of it."""
    if not _is_uneven(problem):
        return {"is_causal": problem.causal}
    from torch.nn.attention.bias import causal_lower_right

    return {"attn_mask": causal_lower_right(problem.seqlen_q, problem.seqlen_k)}


def torch_host_times(
    problem: Problem, q: Any, k: Any, v: Any, measure: Callable[[Callable[[], Any]], Timing]
) -> list[tuple[str, Timing]]:
    """Host time of a bare SDPA call, backend chosen once outside of it, for those that serve the problem."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = [_to_torch(x) for x in (q, k, v)]
    attention = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, *tensors, is_causal=problem.causal
    )
    found = []
    for name, backend in TORCH_BACKENDS.items():
        with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
            try:
                found.append((name, measure(attention)))
            except RuntimeError:
                continue
    return found


def _to_torch(x: Any) -> Any:
    """A tensor over the same memory. bfloat16 travels as its bits: not every DLPack on the way knows it."""
    import torch

    if str(x.dtype) == "bfloat16":
        return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(x)


def _to_cupy(x: Any, dtype: Any) -> Any:
    import cupy
    import torch

    if x.dtype == torch.bfloat16:
        return cupy.from_dlpack(x.view(torch.int16)).view(dtype)
    return cupy.from_dlpack(x)
