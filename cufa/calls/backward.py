"""Gradients of attention: :func:`flash_attention_backward` and :func:`plan_backward`. Checks are in
:mod:`cufa.calls.call`, running in :mod:`cufa.calls.dispatch`, choices in :mod:`cufa.plan.planner`."""

from __future__ import annotations

from typing import Any, Never, Unpack, overload

import numpy.typing as npt

from ..plan.dense import BACKWARD
from ..plan.planner import Plan
from ..problem.checks import check_flag
from ..problem.dropout import check_dropout, resolve_dropout
from ..problem.options import Options, check_causal
from ..problem.score_function import Score, check_gradients, resolve_score
from ..problem.typing import (
    Algorithm,
    AnyMask,
    Array,
    BackwardOptions,
    Four,
    Layout,
    Place,
    Precision,
    Three,
)
from .call import BackwardCall
from .dispatch import plan_shapes, run
from .keywords import unknown_keyword
from .score_operands import NO_SCORE, results_of_backward, with_score, with_seed
from .warm import find, typed


# fmt: off
@overload
def flash_attention_backward(
    dout: Any, q: Array, k: Any, v: Any, out: Any, lse: Any, *,
    sink: None = ..., **options: Unpack[BackwardOptions],
) -> Three[Array]: ...
@overload
def flash_attention_backward(
    dout: Any, q: Array, k: Any, v: Any, out: Any, lse: Any, *,
    sink: npt.ArrayLike, **options: Unpack[BackwardOptions],
) -> Four[Array]: ...
@overload
def flash_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    sink: Any = ..., **options: Unpack[BackwardOptions],
) -> Any: ...
# fmt: on
def flash_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens_q: Any = None, seqlens_k: Any = None, score: Score | None = None, bias: Any = None,
    gradients: tuple[str, ...] | dict[str, Any] = (), dropout: float | None = None, seed: Any = None,
    layout: Layout = "bhsd", algorithm: Algorithm = "auto", precision: Precision | None = None,
    dlse: Any = None, deterministic: bool = False,
    dq: Any = None, dk: Any = None, dv: Any = None, dsink: Any = None, device: Place | None = None,
    **unknown: Never,
) -> Any:  # fmt: skip
    """Gradients of :func:`flash_attention` with respect to q, k and v, in memory linear in the sequence length:
    FlashAttention-2 (Dao, 2023, Algorithm 2), on GPUs from sm_80 on and in NumPy; with the copies, products and warp
    specialisation of FlashAttention-3 (Shah et al., 2024) on Hopper.

    >>> out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cufa.flash_attention_backward(dout, q, k, v, out, lse, causal=True)

    Parameters
    ----------
    dout : array, (batch, heads, seqlen_q, head_dim)
        Gradient of the loss with respect to out. out's shape, q's dtype and place, any strides with a contiguous last
        axis.
    q, k, v : array
        The inputs of the forward call, or arrays of the same values: as for :func:`flash_attention`.
    out, lse : array
        The results of the forward call with ``return_lse=True``. lse is contiguous float32, (batch, heads, seqlen_q) in
        either layout; float64 if q is.
    causal, window, mask, softcap, scale, alibi_slopes, sink, seqlens_q, seqlens_k, score, bias, dropout, seed
        The same values as in the forward call.
    layout, precision
        As in the forward call; precision may differ.
    gradients : tuple of names, or dict of names to arrays
        Arrays of ``score`` (or "bias") whose gradients are returned, too. A dict names the arrays that receive them.
    algorithm : "auto", "fa3" or "fa2"
        Which kernel computes the gradients; it may differ from the forward call's. Forward algorithms without a
        backward ("fa2_noskip", "fa1" and "naive") mean "auto".
    dlse : array, optional
        Gradient of the loss with respect to lse, of lse's shape and dtype, if the loss depends on lse.
    deterministic : bool
        True: all results have the same bits in every run. False: dk, dv and dsink have, under every mask; the last bits
        of dq and of gradients of arrays may differ, because their addition order depends on when thread blocks run.
        dk and dv may have other bits with True than with False. The CPU path is always deterministic. True takes
        workspace: 80 bytes for each element of such an array.
    dq, dk, dv : array, optional
        Arrays that receive the results: shape and dtype of q, k and v, NumPy or CuPy as q. They must not overlap an
        input or each other.
    dsink : array, optional
        An array that receives the gradient of ``sink``: (heads,), in lse's dtype, NumPy or CuPy as q.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed, as for :func:`flash_attention`.

    Returns
    -------
    dq, dk, dv
        With shape, layout and dtype of q, k and v; sums over the query heads of a query group are in float32. Queries
        that see no key, keys that no query sees, and the padding after ``seqlens_q`` and ``seqlens_k`` have gradients
        of exactly 0.
    dsink
        Only with ``sink=``: the gradient of the sink, (heads,), in lse's dtype. ALiBi's slopes have none.
    others
        The gradients of the arrays in ``gradients``, in that order: of each array's shape, in lse's dtype.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched. cufa cannot detect an out/lse
        pair that was made from other inputs or with another mask, scale or cap: the gradients are then wrong. (A call
        with some of the keys may pass out and lse of all keys. It returns these keys' share of the gradients, as
        attention over several GPUs needs.)

    Notes
    -----
    Launches on CuPy's current stream, and synchronises only to copy results back to NumPy. Its workspace, which
    :func:`plan_backward` prints, comes from CuPy's memory pool. After one warm-up call, a call can be captured in a
    CUDA graph. The graph's workspace is released at the first capture after the graph is destroyed.

    On a GPU all inputs must be finite, also where the mask hides them.

    A GPU rounds dS = P ∘ (dout vᵀ - rowsum(dout ∘ out) + dlse) to q's dtype. With float16, elements beyond ±65,504 give
    inf or NaN in dq and dk, even if the gradients are small: divide dout and dlse by a power of two, and multiply the
    gradients by the same power. The CPU rounds results only. Sums must stay below 3.4e38 everywhere, except with
    float64.

    The CPU takes every combination. On a GPU (a band mask is ``full()``, ``causal()`` or ``window()``):

    - fa3_backward (sm_90): float16, bfloat16; head dims 8 to 128, multiples of 8; v's may differ; all masks; padded
      lengths, packed lengths, ALiBi, sinks, a fixed order of additions, score functions, gradients of their arrays and
      dropout.
    - fa3_backward_wide (sm_90): float16, bfloat16; head dims 136 to 256, multiples of 8; v's may differ; all masks;
      padded lengths, packed lengths, ALiBi, sinks, a fixed order of additions, score functions and dropout.
    - fa2_backward (sm_80 or later): float16, bfloat16; all masks; padded lengths, packed lengths, ALiBi, sinks, a
      fixed order of additions, score functions, gradients of their arrays and dropout.
    - fa2_backward_f32 (sm_80 or later): float32, tf32; all masks; padded lengths, packed lengths, ALiBi, sinks, a
      fixed order of additions, score functions, gradients of their arrays and dropout.
    """
    if unknown:
        raise unknown_keyword(flash_attention_backward, unknown)
    if type(causal) is not bool:  # before the warm lookup, whose keys take 1.0 for True
        causal = check_causal(causal)  # type: ignore[unreachable]
    if type(deterministic) is not bool:
        deterministic = check_flag("deterministic", deterministic)  # type: ignore[unreachable]
    options: tuple[Any, ...] = (
        causal, typed(window), mask, softcap, type(softcap), scale, type(scale), layout, algorithm, precision,
        deterministic, device,
    )  # fmt: skip
    given: tuple[Any, ...] = dout, q, k, v, out, lse, dlse, dq, dk, dv
    given_dsink = sink is not None or dsink is not None
    if given_dsink or alibi_slopes is not None or seqlens_q is not None or seqlens_k is not None:
        given += alibi_slopes, sink, seqlens_q, seqlens_k, None, None, *NO_SCORE, dsink
    dropped = 0
    change: Score | None = None
    gradient_names: tuple[str, ...] = ()
    if score is not None or bias is not None or gradients != ():
        change = resolve_score(score, bias)
        gradient_names = check_gradients(change, gradients)
        given, options = (
            with_score(BACKWARD, given, change, gradients),
            (*options, change and change.expression, gradient_names),
        )
    if dropout is not None or seed is not None:
        dropped, seed = resolve_dropout(dropout, seed)
        given, options = with_seed(BACKWARD, given, seed), (*options, "dropout", dropped)
    seen, _, addresses = find(BACKWARD, given, options)
    if seen is not None:
        return seen(given, addresses)
    call_options = Options.of(
        causal, window, mask, softcap, scale, precision, layout, algorithm, deterministic=deterministic,
        score=change, gradients=gradient_names, dropped=dropped,
    )  # fmt: skip
    wanted = results_of_backward(sink, change, gradient_names)
    return run(BackwardCall.read(given, wanted, call_options), device, options)


def plan_backward(
    q: Any, k: Any = None, v: Any = None, *, dtype: npt.DTypeLike | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens_q: Any = None, seqlens_k: Any = None, score: Score | None = None, bias: Any = None,
    gradients: tuple[str, ...] = (), dropout: float | None = None,
    layout: Layout = "bhsd", algorithm: Algorithm = "auto", precision: Precision | None = None,
    deterministic: bool = False, device: str | None = None, **unknown: Never,
) -> Plan:  # fmt: skip
    """The plan of :func:`flash_attention_backward`: kernel, tiles, launches, workspace in bytes, and why. Needs no GPU
    and runs nothing.

    Arguments and errors are as for :func:`plan`; ``deterministic``, ``gradients`` and ``dropout`` as for
    :func:`flash_attention_backward`.

    >>> cufa.plan_backward((1, 8, 4096, 128), causal=True, device="sm_90").spec.name
    'fa3_backward'
    """
    if unknown:
        raise unknown_keyword(plan_backward, unknown)
    change = resolve_score(score, bias)
    options = Options.of(
        causal, window, mask, softcap, scale, precision, layout, algorithm,
        deterministic=check_flag("deterministic", deterministic), score=change,
        gradients=check_gradients(change, gradients), dropped=check_dropout(dropout),
    )  # fmt: skip
    optional = {"alibi_slopes": alibi_slopes, "sink": sink, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return plan_shapes(q, k, v, dtype, device, options, optional, "backward")
