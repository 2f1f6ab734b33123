"""torch.nn.functional.scaled_dot_product_attention, one peer per backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem.problem import Problem
from . import tensors

#: torch's names of the backends, by peer.
BACKENDS = {
    "torch flash": "FLASH_ATTENTION",
    "torch cudnn": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
    "torch math": "MATH",
}

#: Backends with a causal mask aligned bottom-right. For the others torch would make a matrix of the mask.
_LOWER_RIGHT = ("torch flash", "torch efficient")

#: "torch math" stores all scores: more bytes would not fit, or take minutes.
_MATH_MAX_BYTES = 16 << 30


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tensors.Runs:
    """The call on tensors that share memory with the CuPy arrays."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    scores = 6 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    if name == "torch math" and scores > _MATH_MAX_BYTES:
        raise NotImplementedError("stores all scores in memory: too large")
    if problem.deterministic:
        raise NotImplementedError(tensors.NOT_DETERMINISTIC)
    options: dict[str, Any] = {"scale": problem.scale, **mask_options(name, problem)}
    backend = getattr(SDPBackend, BACKENDS[name])
    if problem.group_size > 1:
        options["enable_gqa"] = True
    # float32 products stay float32; only a problem of precision tf32 allows tf32.
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"

    def attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return tensors.runs(attention, arrays)


def mask_options(name: str, problem: Problem) -> dict[str, Any]:
    """Arguments of SDPA. ``is_causal`` aligns top-left; bottom-right is a bias object, which torch passes to
    the backend as a flag, not as a matrix. Raises NotImplementedError for other masks."""
    first, last = problem.edges
    if problem.softcap is not None:
        raise NotImplementedError("torch's SDPA takes no soft cap")
    if first is not None:
        raise NotImplementedError("torch's SDPA takes a window only as a matrix")
    if last is None or (last == 0 and problem.seqlen_q == problem.seqlen_k):
        return {"is_causal": last is not None}
    if last != problem.seqlen_k - problem.seqlen_q:
        raise NotImplementedError("torch's SDPA takes this diagonal only as a matrix")
    if name not in _LOWER_RIGHT:
        raise NotImplementedError(
            "torch aligns this backend's causal mask top-left: not the same computation"
        )
    from torch.nn.attention.bias import causal_lower_right

    return {"attn_mask": causal_lower_right(problem.seqlen_q, problem.seqlen_k)}
