"""Forward attention: the public calls, their checks and the operation's record. How a checked call is carried
out is in :mod:`cufa.calls.calls`, choices in :mod:`cufa.plan.planner`."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..plan.dense import FORWARD
from ..plan.planner import Plan
from ..problem.checks import check_flag
from ..problem.mask import Mask
from ..problem.options import Options, check_causal, check_num_splits, resolve_mask
from .call import ForwardCall
from .calls import plan_shapes, run
from .warm import find, typed


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    num_splits: int | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
) -> Any:
    """Exact attention, ``softmax(scale * q kᵀ) v``, without ever storing the score matrix. Its gradients are
    :func:`flash_attention_backward`'s.

    FlashAttention-3 (Shah et al., 2024, Algorithms 1 and 2) on Hopper, FlashAttention-2 (Dao, 2023, Algorithm
    1) on other GPUs from sm_80 on, and the same schedule in NumPy elsewhere.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        NumPy, CuPy, or anything with DLPack or ``__cuda_array_interface__``. float16, bfloat16
        (``ml_dtypes.bfloat16``), float32; float64 on the CPU only. Any strides with a contiguous last
        axis; read in place. head_dim is a multiple of 8, at most 256.
    k, v : array, (batch, kv_heads, seqlen_k, head_dim)
        Same dtype and place as q. heads must be a multiple of kv_heads: query head h uses key/value
        head ``h // (heads // kv_heads)`` (GQA, MQA), never copied.
    causal : bool
        Query i sees keys up to ``i + seqlen_k - seqlen_q``: aligned bottom-right, so that the last query
        sees the last key, as decoding with a cache needs. (PyTorch's ``is_causal`` is aligned top-left:
        the two agree when seqlen_q == seqlen_k.)
    window : (left, right), optional
        Query i sees keys ``i + δ - left`` to ``i + δ + right``, both included, δ = seqlen_k - seqlen_q; None
        is unbounded. With ``causal=True`` right is 0. Tiles outside the window are neither read nor computed.
    mask : cufa.masks, optional
        The mask as one value, in place of ``causal`` and ``window``: any of :mod:`cufa.masks`. Its numbers may differ
        between key/value heads, not between the query heads of one. Numbers on a GPU are read anew by every call: their
        owner may change them, also between replays of a graph.
    softcap : float, optional
        Scaled scores s become ``softcap · tanh(s / softcap)`` before the mask (Gemma 2). Above 0, at most
        10,000.
    scale : float, optional
        Softmax scale, finite and ≥ 0. Default 1/√head_dim.
    alibi_slopes : array, (heads,) or (batch, heads), optional
        ``slope · |i + δ - j|`` is taken off the score of query i and key j, after the soft cap (ALiBi, Press et al.,
        2022); δ is the mask's, seqlen_k - seqlen_q unless its diagonal says otherwise. Numbers of any sign.
    sink : array, (heads,), optional
        A logit of each query head that joins the denominator of every row, after the mask, and with it lse; it
        brings no value (gpt-oss). A row that sees no key gives zeros and lse = sink. -inf: none.
    seqlens_q, seqlens_k : int32 array, (batch,), optional
        Sequence b is the first ``seqlens_q[b]`` queries and the first ``seqlens_k[b]`` keys of its place: what lies
        behind may hold anything, and is not read. Its rows give zeros and lse = -inf. Masks see the sequence alone:
        its last query's key is its last. Where sequences lie one behind the other, see
        :func:`flash_attention_varlen`.
    layout : "bhsd" or "bshd"
        Axis order of q, k, v and the result: (batch, heads, seqlen, head_dim), or with seqlen before heads.
    algorithm : "auto", "fa3", "fa2", "fa2_noskip", "fa1" or "naive"
        "auto" takes the kernel that recorded benchmarks found fastest for the class of problem on this GPU, and where
        nothing was measured the first in the registry's order that serves the call: FA3 on Hopper, else FA2.
    num_splits : int, optional
        Thread blocks of a GPU that share out the keys of a block of queries, and merge what they have in the order of
        the keys: every run gives the same bits. None: as many as the planner expects to pay, more than one only
        where queries are too few to fill the GPU. There never are more than tiles of keys. FA3's and FA2's kernels for
        float16 and bfloat16 split, under masks that are bands; a CPU does not.
    precision : None, "float32" or "tf32"
        For float32 inputs on a GPU. None keeps float32 accuracy, unless ``CUPY_TF32=1`` is set.
    return_lse : bool
        Also return log-sum-exp of the scaled scores: natural log, (batch, heads, seqlen_q),
        float32; float64 where q is.
    out : array, optional
        Where to write the result: q's shape, dtype and kind; must not overlap an input.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed: the GPU when there is one (None), or as forced. Device arrays
        are always computed where they are.

    Returns
    -------
    out, or (out, lse)
        NumPy for NumPy inputs, CuPy for device arrays. A query that sees no key gives zeros and lse = -inf.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what to do; nothing has been launched.

    Notes
    -----
    Launches on CuPy's current stream and does not synchronise (NumPy inputs on a GPU do, to bring the
    result back). With ``out=`` and after one warm-up call it can be captured in a CUDA graph.

    The CPU takes every combination. On a GPU (a band mask is ``full()``, ``causal()`` or ``window()``):

    - fa3_forward (sm_90): float16, bfloat16; all masks; with band masks also padded lengths, packed lengths, ALiBi
      and sinks.
    - fa2_forward (sm_80 or later): float16, bfloat16; all masks; with band masks also padded lengths, packed
      lengths, ALiBi and sinks.
    - fa2_forward_f32 (sm_80 or later): float32, tf32; all masks.
    - fa1_forward (sm_80 or later): float16, bfloat16; band masks.
    - fa1_forward_f32 (sm_80 or later): float32, tf32; band masks.
    - naive (sm_80 or later): float16, bfloat16, float32, tf32; all masks.

    On a GPU, keys and values that the mask hides from a query must still be finite: a tile that holds
    some that it sees is multiplied as a whole, and 0 · inf is NaN.

    Scores are float32. On a GPU those of scale * q kᵀ must stay within ±2e7 (where float32 is coarser than 1,
    so that softmax is a guess anyway): the exponentials of larger ones overflow, and rows come out as NaN.
    ``algorithm="naive"`` and the CPU take what float32 holds.

    On a GPU, numbers closer to 0 than 1.2e-38 (denormal ones, which float32 and bfloat16 can hold) are read and
    written as 0. float16 keeps its own.
    """
    if type(causal) is not bool:  # before a call that was seen: to it 1.0 would be True
        causal = check_causal(causal)  # type: ignore[unreachable]
    changes = None  # what most calls do without costs them nothing
    given: tuple[Any, ...] = q, k, v, out, None
    if window is not None or mask is not None or softcap is not None:
        plain = mask is None and softcap is None
        changes = typed(window) if plain else (typed(window), mask, softcap, type(softcap))
    if alibi_slopes is not None or sink is not None or seqlens_q is not None or seqlens_k is not None:
        given += alibi_slopes, sink, seqlens_q, seqlens_k
    if num_splits is not None and type(num_splits) is not int:
        num_splits = check_num_splits(num_splits)  # before a call that was seen: to it 1.0 would be 1
    options = (
        causal,
        scale,
        type(scale),
        layout,
        algorithm,
        num_splits,
        precision,
        return_lse,
        device,
        changes,
    )
    seen, _, addresses = find(FORWARD, given, options)
    if seen is not None:
        return seen(given, addresses)
    wanted = ("out", "lse") if check_flag("return_lse", return_lse) else ("out",)
    mask = resolve_mask(causal, window, mask)
    asked = Options(mask, softcap, scale, precision, layout, algorithm, num_splits)
    return run(ForwardCall.read(given, wanted, asked), device, options)


def plan(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: npt.DTypeLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    num_splits: int | None = None,
    precision: str | None = None,
    device: str | None = None,
) -> Plan:
    """What :func:`flash_attention` would run, and why; needs no GPU and runs nothing. For
    :func:`flash_decode` there is :func:`plan_decode`.

    q, k and v are arrays or just shapes; k and v default to q. ``causal``, ``window``, ``mask``, ``softcap``,
    ``scale``, ``alibi_slopes``, ``sink`` (True will do for these two), ``seqlens_q``, ``seqlens_k``, ``layout``,
    ``algorithm``, ``num_splits`` and ``precision`` are as for :func:`flash_attention`. ``dtype`` is a
    name such as "bfloat16", or a dtype of NumPy's (default: the arrays', or float16 for shapes). ``device`` is None
    (what a call here would use), "cpu", "cuda", or an architecture such as "sm_90", planned for its typical card.

    >>> print(cufa.plan((1, 8, 4096, 128), causal=True, device="sm_90"))  # doctest: +SKIP
    """
    mask = resolve_mask(causal, window, mask)
    options = Options(mask, softcap, scale, precision, layout, algorithm, num_splits)
    optional = {"alibi_slopes": alibi_slopes, "sink": sink, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return plan_shapes(q, k, v, dtype, device, options, optional)
