"""Attention for PyTorch: an operator with gradients, on the memory of its tensors, that ``torch.compile`` takes whole.

Importing this module imports PyTorch; ``import cufa`` does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from .calls.backward import flash_attention_backward
from .calls.forward import flash_attention
from .calls.varlen import flash_attention_varlen, flash_attention_varlen_backward
from .problem.mask import Mask
from .problem.typing import Algorithm, Layout, Precision

Window = tuple[int | None, int | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout = "bhsd",
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    algorithm: Algorithm = "auto",
    num_splits: int | None = None,
    precision: Precision | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`cufa.flash_attention` with gradients for q, k, v and sink (FlashAttention-2, Dao, 2023, Algorithms 1, 2).

    Parameters
    ----------
    q : Tensor, (batch, heads, seqlen_q, head_dim)
        float16, bfloat16 or float32, on the CPU or a GPU; float64 on the CPU.
    k, v : Tensor, (batch, kv_heads, seqlen_k, head_dim)
        q's dtype and device.
    causal : bool
        Aligned bottom-right. PyTorch's ``is_causal`` is aligned top-left: ``mask=cufa.masks.causal("top-left")``.
    deterministic : bool, optional
        The gradients have the same bits in every run. Default: ``torch.are_deterministic_algorithms_enabled()``.
    others
        As for :func:`cufa.flash_attention`; alibi_slopes, sink and sequence lengths are tensors on q's device.

    Returns
    -------
    out, or (out, lse)
        out: q's shape and dtype. lse: float32 (batch, heads, seqlen_q), float64 where q is.

    Raises
    ------
    TypeError, ValueError
        As :func:`cufa.flash_attention`.
    """
    options = _text(
        deterministic, causal=causal, window=window, mask=_mask_text(mask), softcap=softcap, scale=scale,
        algorithm=algorithm, precision=precision, return_lse=return_lse, layout=layout, num_splits=num_splits,
    )  # fmt: skip
    out, lse = _attention(q, k, v, alibi_slopes, sink, seqlens_q, seqlens_k, None, None, options)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    algorithm: Algorithm = "auto",
    precision: Precision | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`cufa.flash_attention_varlen` with gradients: packed sequences, q (total_q, heads, head_dim).

    cu_seqlens_q and cu_seqlens_k are int32 (sequences + 1,); lse is (heads, total_q). The rest is as for
    :func:`attention`.
    """
    options = _text(
        deterministic, causal=causal, window=window, mask=_mask_text(mask), softcap=softcap, scale=scale,
        algorithm=algorithm, precision=precision, return_lse=return_lse,
    )  # fmt: skip
    out, lse = _attention(q, k, v, alibi_slopes, sink, None, None, cu_seqlens_q, cu_seqlens_k, options)
    return (out, lse) if return_lse else out


#: torch.compile takes a mask's text for a constant ...
torch.compiler.assume_constant_result(Mask.as_text)


def _mask_text(mask: Mask | None) -> str | None:
    if mask is None:
        return None
    id(mask)  # ... of this mask only: for another one it compiles anew
    return mask.as_text()


@torch.compiler.assume_constant_result
def _text(deterministic: bool | None, **options: Any) -> str:
    """The options that are not tensors, as text: an operator's schema has no type for a mask."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return json.dumps({**options, "deterministic": deterministic})


@functools.lru_cache(1024)
def _options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    if found["window"] is not None:
        found["window"] = tuple(found["window"])
    if found["mask"] is not None:
        found["mask"] = Mask.from_json(json.loads(found["mask"]))
    return found


def _keywords(text: str, left_out: tuple[str, ...], q: Tensor, **tensors: Tensor | None) -> dict[str, Any]:
    """Keywords of a call of cufa: options, the tensors that are given, and where CPU tensors are computed."""
    options = {name: x for name, x in _options(text).items() if name not in ("return_lse", *left_out)}
    given = {name: _array(x) for name, x in tensors.items() if x is not None}
    return {**options, **given, "device": None if q.is_cuda else "cpu"}


def _array(x: Tensor) -> Any:
    """The tensor's memory, as cufa reads it. NumPy has no bfloat16 of its own, so its bits are viewed."""
    x = x.detach()
    if x.is_cuda:
        return x
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@contextlib.contextmanager
def _on_stream_of(q: Tensor) -> Iterator[None]:
    """Kernels run on PyTorch's current stream."""
    if not q.is_cuda:
        yield
        return
    import cupy

    stream = torch.cuda.current_stream(q.device).cuda_stream
    with cupy.cuda.Device(q.device.index), cupy.cuda.ExternalStream(stream, q.device.index):
        yield


@torch.library.custom_op("cufa::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    given = [_array(x) for x in (q, k, v, cu_seqlens_q, cu_seqlens_k) if x is not None]
    keywords = _keywords(
        options, ("deterministic",), q, out=out, alibi_slopes=alibi_slopes, sink=sink, seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
    )  # fmt: skip
    call = flash_attention if cu_seqlens_q is None else flash_attention_varlen
    with _on_stream_of(q):
        _, lse = call(*given, return_lse=True, **keywords)
        return out, torch.from_dlpack(lse)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Any, sink: Any, seqlens_q: Any, seqlens_k: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, options: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads_last = q.dim() == 3 or _options(options).get("layout") == "bshd"
    rows = q.shape[:-1]
    shape = (*rows[:-2], rows[-1], rows[-2]) if heads_last else rows
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("cufa::attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    given = [_array(x) for x in (dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k) if x is not None]
    keywords = _keywords(
        options, ("num_splits",), q, dq=dq, dk=dk, dv=dv, dlse=dlse, alibi_slopes=alibi_slopes, sink=sink,
        seqlens_q=seqlens_q, seqlens_k=seqlens_k,
    )  # fmt: skip
    call = flash_attention_backward if cu_seqlens_q is None else flash_attention_varlen_backward
    with _on_stream_of(q):
        found = call(*given, **keywords)
        dsink = lse.new_empty(0) if sink is None else torch.from_dlpack(found[3])
    return dq, dk, dv, dsink


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, alibi_slopes: Any, sink: Any,
    seqlens_q: Any, seqlens_k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsink = lse.new_empty(0) if sink is None else lse.new_empty(sink.shape)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *optional, out, lse = ctx.saved_tensors
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dlse_used = dlse.contiguous() if _options(ctx.options)["return_lse"] else None
    dq, dk, dv, dsink = _backward(dout, q, k, v, out, lse, dlse_used, *optional, ctx.options)
    sink = optional[1]
    return dq, dk, dv, None, None if sink is None else dsink.to(sink.dtype), None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_setup_context)
