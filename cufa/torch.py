"""Attention for PyTorch: an operator with gradients, on the memory of its tensors, that ``torch.compile`` takes whole.

Importing this module imports PyTorch; ``import cufa`` does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never, Unpack, overload

import ml_dtypes
import torch
from torch import Tensor

from .calls import operators
from .calls.backward import flash_attention_backward
from .calls.forward import flash_attention
from .calls.keywords import unknown_keyword
from .calls.varlen import flash_attention_varlen, flash_attention_varlen_backward
from .problem.checks import import_cupy
from .problem.dropout import resolve_dropout
from .problem.kept_masks import kept
from .problem.mask import Mask
from .problem.options import resolve_mask
from .problem.typing import (
    Algorithm,
    AnyMask,
    Layout,
    Off,
    On,
    OperatorOptions,
    PackedOperatorOptions,
    Precision,
)

Window = tuple[int | None, int | None]
Function = Callable[..., Any]


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    deterministic: bool | None = ..., return_lse: Off = ..., **options: Unpack[OperatorOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    deterministic: bool | None = ..., return_lse: On, **options: Unpack[OperatorOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    deterministic: bool | None = ..., return_lse: bool = ..., **options: Unpack[OperatorOptions],
) -> Any: ...
# fmt: on
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout = "bhsd",
    causal: bool = False, window: Window | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None, seqlens_q: Tensor | None = None, seqlens_k: Tensor | None = None,
    score: Function | None = None, arrays: Mapping[str, Tensor] | None = None, bias: Tensor | None = None,
    dropout: float | None = None, seed: int | Tensor | None = None,
    algorithm: Algorithm = "auto", num_splits: int | None = None, precision: Precision | None = None,
    deterministic: bool | None = None, return_lse: bool = False, **unknown: Never,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention` with gradients for q, k, v, sink, bias and arrays of a score function
    (FlashAttention-2, Dao, 2023, Algorithms 1, 2).

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
    score, arrays : callable, and dict of Tensor, optional
        ``score(s, b, h, i, j, **arrays)`` in NumPy, as for :func:`cufa.score`, and the tensors that it reads, on q's
        device. A function is traced once: other tensors need no compilation. Tensors that require grad receive it.
    seed : int or Tensor, optional
        The seed of ``dropout``: an int, or int64 (2,) on q's device, a seed and a number. Each call needs another.
    others
        As for :func:`cufa.flash_attention`; alibi_slopes, sink and sequence lengths are tensors on q's device.

    Returns
    -------
    out, or (out, lse)
        out: q's shape, with v's head_dim, and dtype. lse: float32 (batch, heads, seqlen_q), float64 if q is.

    Raises
    ------
    TypeError, ValueError
        As :func:`cufa.flash_attention`.
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    _check_slopes(alibi_slopes)
    options = _text(
        deterministic, causal=causal, mask=_name(mask), algorithm=algorithm, precision=precision,
        return_lse=return_lse, layout=layout, dropout=dropout, **_score(score, arrays, bias),
    )  # fmt: skip
    numbers = _numbers(window, softcap, scale)
    given = alibi_slopes, sink, seqlens_q, seqlens_k, None, None, _seed(seed), _tensors(arrays, bias)
    out, lse = _attention(q, k, v, *given, *numbers, num_splits, options)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    deterministic: bool | None = ..., return_lse: Off = ..., **options: Unpack[PackedOperatorOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    deterministic: bool | None = ..., return_lse: On, **options: Unpack[PackedOperatorOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    deterministic: bool | None = ..., return_lse: bool = ..., **options: Unpack[PackedOperatorOptions],
) -> Any: ...
# fmt: on
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    causal: bool = False, window: Window | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None, score: Function | None = None, arrays: Mapping[str, Tensor] | None = None,
    bias: Tensor | None = None, dropout: float | None = None, seed: int | Tensor | None = None,
    algorithm: Algorithm = "auto", precision: Precision | None = None, deterministic: bool | None = None,
    return_lse: bool = False, **unknown: Never,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention_varlen` with gradients: packed sequences, q (total_q, heads, head_dim).

    cu_seqlens_q and cu_seqlens_k are int32 (sequences + 1,); lse is (heads, total_q). The rest is as for
    :func:`attention`.
    """
    if unknown:
        raise unknown_keyword(attention_varlen, unknown)
    _check_slopes(alibi_slopes)
    options = _text(
        deterministic, causal=causal, mask=_name(mask), algorithm=algorithm, precision=precision,
        return_lse=return_lse, dropout=dropout, **_score(score, arrays, bias),
    )  # fmt: skip
    numbers = _numbers(window, softcap, scale)
    given = alibi_slopes, sink, None, None, cu_seqlens_q, cu_seqlens_k, _seed(seed), _tensors(arrays, bias)
    out, lse = _attention(q, k, v, *given, *numbers, None, options)
    return (out, lse) if return_lse else out


def _check_slopes(alibi_slopes: Tensor | None) -> None:
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise TypeError(
            "alibi_slopes requires grad, but slopes have no gradient here: pass alibi_slopes.detach()"
        )


def _seed(seed: int | Tensor | None) -> Tensor | None:
    """The seed as two int64, with the bits of uint64."""
    if seed is None or isinstance(seed, Tensor):
        return seed
    resolve_dropout(0.5, seed)
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, 0], dtype=torch.int64)


#: torch.compile treats the name of a mask as a constant.
torch.compiler.assume_constant_result(Mask.name_for_operators)


def _name(mask: AnyMask | None) -> str | None:
    if mask is None:
        return None
    mask = resolve_mask(False, None, mask)
    id(mask)  # makes torch.compile guard on this mask: it compiles anew for another one
    return mask.name_for_operators(torch.compiler.is_compiling())


def _score(
    score: Function | None, arrays: Mapping[str, Tensor] | None, bias: Tensor | None
) -> dict[str, Any]:
    """Options of the operator: the function by its name, and the names of its tensors."""
    function, tensors = operators.score_of(score, arrays, bias)
    return {"score": _name_of_function(function, torch.compiler.is_compiling()), "arrays": [*tensors]}


_name_of_function = torch.compiler.assume_constant_result(operators.name_of)


def _tensors(arrays: Mapping[str, Tensor] | None, bias: Tensor | None) -> list[Tensor]:
    return [*(arrays or {}).values(), *([] if bias is None else [bias])]


Numbers = tuple[bool, int | None, int | None, float | None, float | None]


def _numbers(window: Window | None, softcap: float | None, scale: float | None) -> Numbers:
    """Whether there is a window, its bounds, softcap and scale: arguments of the operator that may vary from call to
    call without another compilation."""
    left, right = window if window is not None else (None, None)
    if not torch.compiler.is_compiling():  # PyTorch does not take NumPy's scalars
        left, right = (None if x is None else int(x) for x in (left, right))
        softcap, scale = (None if x is None else float(x) for x in (softcap, scale))
    return window is not None, left, right, softcap, scale


@torch.compiler.assume_constant_result
def _text(deterministic: bool | None, **options: Any) -> str:
    """The options that are names or flags, as text: an operator's schema has no type for a mask."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        deterministic = deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
    return json.dumps({**options, "deterministic": deterministic})


@functools.lru_cache(1024)
def _options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def _keywords(
    text: str, numbers: Numbers, left_out: tuple[str, ...], q: Tensor, arrays: list[Tensor], **more: Any
) -> dict[str, Any]:
    """Keywords of a call of cufa: options, the tensors that are given, and where CPU tensors are computed."""
    has_window, left, right, softcap, scale = numbers
    options = {name: x for name, x in _options(text).items() if name not in ("return_lse", *left_out)}
    options["mask"] = None if options["mask"] is None else kept(options["mask"])
    named = zip(options.pop("arrays"), map(_array, arrays), strict=True)
    options |= operators.arguments(options.pop("score"), named)
    options |= {"window": (left, right) if has_window else None, "softcap": softcap, "scale": scale}
    given = {name: _array(x) if isinstance(x, Tensor) else x for name, x in more.items() if x is not None}
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
    cupy = import_cupy("q")
    stream = torch.cuda.current_stream(q.device).cuda_stream
    with cupy.cuda.Device(q.device.index), cupy.cuda.ExternalStream(stream, q.device.index):
        yield


@torch.library.custom_op("cufa::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor,
    alibi_slopes: Tensor | None, sink: Tensor | None, seqlens_q: Tensor | None, seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None, arrays: list[Tensor],
    has_window: bool, left: int | None, right: int | None, softcap: float | None, scale: float | None,
    num_splits: int | None, options: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}: convert with {name}.to(q.dtype)")
    out, lse = _empty_results(q, v, options)
    given = [_array(x) for x in (q, k, v, cu_seqlens_q, cu_seqlens_k) if x is not None]
    keywords = _keywords(
        options, (has_window, left, right, softcap, scale), ("deterministic",), q, arrays, out=out, lse=lse,
        num_splits=num_splits, alibi_slopes=alibi_slopes, sink=sink, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
        seed=seed,
    )  # fmt: skip
    call = flash_attention if cu_seqlens_q is None else flash_attention_varlen
    with _on_stream_of(q):
        call(*given, return_lse=True, **keywords)
    return out, lse


def _empty_results(q: Tensor, v: Tensor, options: str) -> tuple[Tensor, Tensor]:
    """Memory of PyTorch for out and lse: a CUDA graph keeps PyTorch's memory, not CuPy's."""
    rows = q.shape[:-1]
    if q.dim() == 3 or _options(options).get("layout") == "bshd":
        rows = rows[:-2] + rows[:-3:-1]
    same = q.shape[-1] == v.shape[-1]
    out = torch.empty_like(q) if same else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))


_attention.register_fake(lambda q, k, v, *others: _empty_results(q, v, others[-1]))


@torch.library.custom_op("cufa::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    alibi_slopes: Tensor | None, sink: Tensor | None, seqlens_q: Tensor | None, seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None, arrays: list[Tensor],
    has_window: bool, left: int | None, right: int | None, softcap: float | None, scale: float | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    results = _empty_gradients(q, k, v, lse, sink, arrays, options)
    dq, dk, dv, dsink, of_arrays = results
    given = [_array(x) for x in (dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k) if x is not None]
    keywords = _keywords(
        options, (has_window, left, right, softcap, scale), (), q, arrays, dq=dq, dk=dk, dv=dv,
        dsink=None if sink is None else dsink, dlse=dlse, alibi_slopes=alibi_slopes, sink=sink, seqlens_q=seqlens_q,
        seqlens_k=seqlens_k, seed=seed,
    )  # fmt: skip
    names = keywords["gradients"]
    keywords["gradients"] = dict(zip(names, map(_array, of_arrays), strict=True)) if names else ()
    call: Callable[..., Any] = (
        flash_attention_backward if cu_seqlens_q is None else flash_attention_varlen_backward
    )
    with _on_stream_of(q):
        call(*given, **keywords)
    return results


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, sink: Tensor | None, arrays: list[Tensor], options: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    dsink = lse.new_empty(0 if sink is None else sink.shape)
    found = _options(options)
    of_arrays = [lse.new_empty(arrays[found["arrays"].index(name)].shape) for name in found["gradients"]]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsink, of_arrays


_backward.register_fake(
    lambda dout, q, k, v, out, lse, dlse, slopes, sink, *others: _empty_gradients(
        q, k, v, lse, sink, others[5], others[-1]
    )
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, arrays, ctx.numbers, ctx.options = inputs[:10], inputs[10], inputs[11:16], inputs[-1]
    names = (_options(ctx.options)[name] for name in ("mask", "score"))
    ctx.mask, ctx.score = (None if name is None else kept(name) for name in names)  # as long as the graph
    ctx.save_for_backward(*tensors, *output, *arrays)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    (q, k, v, *optional, out, lse), arrays = ctx.saved_tensors[:12], [*ctx.saved_tensors[12:]]
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    options = dict(_options(ctx.options))
    dlse_used = dlse.contiguous() if options["return_lse"] else None
    wanted = ctx.needs_input_grad[10]
    options["gradients"] = [name for name, needed in zip(options["arrays"], wanted, strict=True) if needed]
    if ctx.mask is not None:  # other masks may have taken its place since
        options["mask"] = ctx.mask.name_for_operators(False)
    options["score"] = operators.name_of(ctx.score, False)
    dq, dk, dv, dsink, found = _backward(
        dout, q, k, v, out, lse, dlse_used, *optional, arrays, *ctx.numbers, json.dumps(options)
    )
    sink, of_arrays = optional[1], iter(found)
    darrays = [
        next(of_arrays).to(x.dtype) if needed else None for x, needed in zip(arrays, wanted, strict=True)
    ]
    return dq, dk, dv, None, None if sink is None else dsink.to(sink.dtype), *[None] * 5, darrays, *[None] * 7


_attention.register_autograd(_differentiate, setup_context=_setup_context)
