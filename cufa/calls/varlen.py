"""Attention over packed (concatenated) sequences: the operations forward and backward with packed lengths."""

from __future__ import annotations

from typing import Any, Never, Unpack, overload

import numpy.typing as npt

from ..plan.dense import BACKWARD, FORWARD
from ..problem.checks import check_flag
from ..problem.dropout import resolve_dropout
from ..problem.float8 import is_float8
from ..problem.options import Options, check_causal, check_num_splits, read_forward
from ..problem.score_function import Score, check_gradients, resolve_score
from ..problem.typing import (
    Accumulate,
    Algorithm,
    AnyMask,
    Array,
    Four,
    Lse,
    Off,
    On,
    OutDtype,
    PackedBackwardOptions,
    PackedOptions,
    Place,
    Precision,
    ScaledPackedOptions,
    Three,
)
from ..problem.where import Where
from .call import PackedBackward, PackedForward
from .dispatch import no_scaled_cache, run
from .forward import invariant_without_cache
from .keywords import unknown_keyword
from .score_operands import NO_SCORE, refuse_score, results_of_backward, with_score, with_seed
from .warm import find, typed


# fmt: off
@overload
def flash_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *, return_lse: Off = ...,
    **options: Unpack[PackedOptions],
) -> Array: ...
@overload
def flash_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *, return_lse: On,
    **options: Unpack[PackedOptions],
) -> tuple[Array, Lse]: ...
@overload
def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *, return_lse: bool = ...,
    **options: Unpack[ScaledPackedOptions],
) -> Any: ...
# fmt: on
def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None, *,
    cache_seqlens: Any = None, block_table: Any = None, k_new: Any = None, v_new: Any = None,
    tree: Any = None, invariant: bool = False,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    score: Score | None = None, bias: Any = None, dropout: float | None = None, seed: Any = None,
    algorithm: Algorithm = "auto", num_splits: int | None = None, precision: Precision | None = None,
    q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, out_dtype: OutDtype | None = None,
    accumulate: Accumulate | None = None,
    return_lse: bool = False, out: Any = None, lse: Any = None, device: Place | None = None, **unknown: Never,
) -> Any:  # fmt: skip
    """:func:`flash_attention` over concatenated sequences of different lengths, without padding: each query sees keys
    of its own sequence only.

    >>> out = cufa.flash_attention_varlen(q, k, v, [0, 5, 5, 12], [0, 5, 9, 16], causal=True)

    Parameters
    ----------
    q : array, (total_q, heads, head_dim)
        As for :func:`flash_attention`, except for the axes.
    k, v : array, (total_k, kv_heads, head_dim)
        As for :func:`flash_attention`, except for the axes.
    cu_seqlens_q, cu_seqlens_k : int32 array, (sequences + 1,)
        Cumulative lengths: sequence b is queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` and keys
        ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1] - 1``. The first value is 0, and values do not decrease; sequences
        may be empty. Rows after the last sequence are padding: they are not read, and give zeros and lse = -inf. A list
        or NumPy array is checked, and copied by each call. An array on the GPU is read by kernels only, unchecked: its
        owner may change it between calls and between replays of a graph. Values that decrease there give wrong
        results.
    cache_seqlens, block_table : int32 array, optional
        As for :func:`flash_attention`, in place of ``cu_seqlens_k``: k and v are a cache with four axes, (num_pages,
        kv_heads, page_size, head_dim), or (batch, kv_heads, capacity, head_dim). One call may have sequences with many
        queries and others with one (prefill and decode). Pages in another order of axes are views:
        ``k.swapaxes(1, 2)``.
    k_new, v_new : array, (total_q, kv_heads, head_dim), optional
        A key and value of each query, which the call first writes into the cache.
    tree
        As for :func:`flash_attention`: no sequence may have more than 64 queries.
    invariant
        As for :func:`flash_attention`; whether queries are packed or padded makes no difference either.
    causal, window, mask
        The mask within each sequence, whose last query has the position of its last key. Booleans broadcast to
        (sequences, heads, most queries, most keys of a sequence), and masks of runs have numbers for the most keys; a
        sequence reads the first rows and keys. (If cu_seqlens are on a GPU, the most are total_q and total_k.) In a
        function (:func:`cufa.masks.where`) b is the index of the sequence, i and j count within it, and delta is its
        keys less its queries. With a function, every call makes a bit for each pair of a query and a key of the arrays,
        total_q · total_k / 8 bytes, and reads the function's arrays anew; on a GPU padding after the last sequence must
        be finite. With ALiBi, score, bias, dropout or a sink, and for ``a | b`` of other masks, each sequence has as
        many bits as the longest may have scores. A cache takes bands, also with exempt tokens, and chunks.
    alibi_slopes, sink
        As for :func:`flash_attention`, with batch the number of sequences.
    score, bias, dropout, seed
        As for :func:`flash_attention`: b is the index of the sequence; i and j count within it.
    out, lse : array, optional
        Where to write the results: (total_q, heads, head_dim), and with ``return_lse=True`` (heads, total_q).
    q_scale, k_scale, v_scale : float32 array, optional
        As for :func:`flash_attention`, in the shapes that :func:`quantize` returns with ``cu_seqlens``.
    softcap, scale, algorithm, num_splits, precision, out_dtype, accumulate, return_lse, device
        As for :func:`flash_attention`.

    Returns
    -------
    out, or (out, lse)
        Of q's shape, with v's head_dim; lse is (heads, total_q).

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched. The kernels that take packed
        lengths on a GPU are listed at :func:`flash_attention`.
    """
    if unknown:
        raise unknown_keyword(flash_attention_varlen, unknown)
    causal, invariant = check_causal(causal), check_flag("invariant", invariant)
    num_splits = check_num_splits(num_splits)
    changes = typed(window), _seen_by(mask), softcap, type(softcap)
    change = resolve_score(score, bias)
    expression = change and change.expression
    dropped, seed = resolve_dropout(dropout, seed)
    options = (
        causal, scale, type(scale), algorithm, num_splits, precision, return_lse, device, changes, expression,
        invariant, dropped,
    )  # fmt: skip
    given: tuple[Any, ...] = q, k, v, out, lse, alibi_slopes, sink, None, None, cu_seqlens_q, cu_seqlens_k
    in_cache = not (cache_seqlens is block_table is k_new is v_new is tree is None)
    if in_cache:
        given += cache_seqlens, block_table, k_new, v_new, tree
    given = with_seed(FORWARD, with_score(FORWARD, given, change), seed)
    scaled = q_scale is not None or k_scale is not None or v_scale is not None or out_dtype is not None
    scaled = scaled or accumulate is not None
    if not scaled:
        seen, _, addresses = find(FORWARD, given, options)
        if seen is not None:
            return seen(given, addresses)
    if in_cache and (scaled or is_float8(q) or is_float8(k)):
        raise no_scaled_cache()
    if invariant and not in_cache:
        raise invariant_without_cache()
    _check_given(cu_seqlens_q, True if in_cache else cu_seqlens_k)
    arguments = return_lse, causal, window, mask, softcap, scale, precision, "bshd", algorithm, num_splits
    if scaled or is_float8(q):
        from .float8 import PackedFloat8

        refuse_score(change, q, dropped)
        return PackedFloat8.result(
            given, (q_scale, k_scale, v_scale), out_dtype, accumulate, arguments, device, options
        )
    read = read_forward(*arguments, score=change, invariant=invariant, dropped=dropped)
    return run(PackedForward.read(given, *read), device, options)


# fmt: off
@overload
def flash_attention_varlen_backward(
    dout: Any, q: Array, k: Any, v: Any, out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    sink: None = ..., **options: Unpack[PackedBackwardOptions],
) -> Three[Array]: ...
@overload
def flash_attention_varlen_backward(
    dout: Any, q: Array, k: Any, v: Any, out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    sink: npt.ArrayLike, **options: Unpack[PackedBackwardOptions],
) -> Four[Array]: ...
@overload
def flash_attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    sink: Any = ..., **options: Unpack[PackedBackwardOptions],
) -> Any: ...
# fmt: on
def flash_attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    score: Score | None = None, bias: Any = None, gradients: tuple[str, ...] | dict[str, Any] = (),
    dropout: float | None = None, seed: Any = None,
    algorithm: Algorithm = "auto", precision: Precision | None = None, dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None, dk: Any = None, dv: Any = None, dsink: Any = None, device: Place | None = None,
    **unknown: Never,
) -> Any:  # fmt: skip
    """Gradients of :func:`flash_attention_varlen`.

    Parameters
    ----------
    dout, out : array, (total_q, heads, head_dim)
        Gradient of the loss with respect to out, and the forward call's result.
    lse, dlse : array, (heads, total_q)
        The forward call's log-sum-exp, and optionally the gradient of the loss with respect to it.
    dq, dk, dv, dsink : array, optional
        Where to write the results, of q's, k's, v's and sink's shapes.
    others
        As for :func:`flash_attention_varlen` and :func:`flash_attention_backward`.

    Returns
    -------
    dq, dk, dv, and with ``sink=`` dsink
        As :func:`flash_attention_backward`. Rows after the last sequence have gradients of exactly 0.

    Raises
    ------
    TypeError, ValueError
        As :func:`flash_attention_varlen`.
    """
    if unknown:
        raise unknown_keyword(flash_attention_varlen_backward, unknown)
    causal, deterministic = check_causal(causal), check_flag("deterministic", deterministic)
    changes = typed(window), _seen_by(mask), softcap, type(softcap)
    change = resolve_score(score, bias)
    gradient_names = check_gradients(change, gradients)
    dropped, seed = resolve_dropout(dropout, seed)
    score_key = change and change.expression, gradient_names, dropped
    options = causal, scale, type(scale), algorithm, precision, deterministic, device, changes, score_key
    given: tuple[Any, ...] = (
        dout, q, k, v, out, lse, dlse, dq, dk, dv,
        alibi_slopes, sink, None, None, cu_seqlens_q, cu_seqlens_k, *NO_SCORE, dsink,
    )  # fmt: skip
    given = with_seed(BACKWARD, with_score(BACKWARD, given, change, gradients), seed)
    seen, _, addresses = find(BACKWARD, given, options)
    if seen is not None:
        return seen(given, addresses)
    _check_given(cu_seqlens_q, cu_seqlens_k)
    call_options = Options.of(
        causal, window, mask, softcap, scale, precision, "bshd", algorithm, deterministic=deterministic, score=change,
        gradients=gradient_names, dropped=dropped,
    )  # fmt: skip
    wanted = results_of_backward(sink, change, gradient_names)
    return run(PackedBackward.read(given, wanted, call_options), device, options)


def _seen_by(mask: Any) -> Any:
    """The mask in the warm lookup's key. A list, which is not hashable, stands for a function: every call reads its
    arrays and cu_seqlens anew."""
    return [mask] if isinstance(mask, Where) else mask


def _check_given(cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None:
            raise TypeError(f"{name} is None: pass where each sequence begins and the last sequence ends")
