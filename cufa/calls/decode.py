"""Decoding: the public calls. Checks: :mod:`cufa.calls.decode_checks`. Choices: :mod:`cufa.plan.decode`."""

from __future__ import annotations

import dataclasses
from typing import Any, Never, Unpack, overload

import numpy.typing as npt

from ..gpu.architectures import Device
from ..plan.decode import DECODE
from ..plan.planner import Plan
from ..problem.checks import as_array, check_choice, check_flag, is_device_array
from ..problem.options import Options, check_num_splits, check_softmax_max, decode_mask
from ..problem.score_function import Score, resolve_score
from ..problem.typing import AnyMask, Array, DecodeOptions, DecodeSchedule, Layout, Lse, Off, On, Place
from . import optional_operands
from . import shared_prefix as prefixes
from .decode_checks import DecodeCall, check_gpu_serves, dtypes, scale_mode
from .dispatch import plan_for, planning_device, run
from .keywords import unknown_keyword
from .maximum import option_and_array
from .score_operands import NO_SCORE, with_score
from .shapes import asked_dtype, make_decode_problem
from .warm import find, typed


@overload
def flash_decode(
    q: Array,
    k_cache: Any,
    v_cache: Any,
    *,
    return_lse: Off = ...,
    **options: Unpack[DecodeOptions],
) -> Array: ...
@overload
def flash_decode(
    q: Array, k_cache: Any, v_cache: Any, *, return_lse: On, **options: Unpack[DecodeOptions]
) -> tuple[Array, Lse]: ...
@overload
def flash_decode(
    q: Any, k_cache: Any, v_cache: Any, *, return_lse: bool = ..., **options: Unpack[DecodeOptions]
) -> Any: ...
def flash_decode(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any = None, block_table: Any = None,
    k_new: Any = None, v_new: Any = None, k_scale: Any = None, v_scale: Any = None,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    layout: Layout = "bhsd", num_splits: int | None = None, schedule: DecodeSchedule = "auto",
    softmax_max: Any = None, key_norms: Any = None, score: Score | None = None, bias: Any = None,
    invariant: bool = False, tree: Any = None,
    shared_prefix: tuple[Any, Any] | None = None,
    return_lse: bool = False, out: Any = None, device: Place | None = None, **unknown: Never,
) -> Any:  # fmt: skip
    """Attention of a few new query tokens over a key/value cache, each cached byte read once.

    Flash-Decoding (Dao et al., 2023): the cache of a sequence is split over the whole GPU, and partial results are
    merged by their log-sum-exp. Ragged batches are cut into shares of all tiles instead (stream-K, LeanAttention).
    The caches are read in place. Unused slots and unused entries of the block table may hold any values.

    Parameters
    ----------
    q : array, (batch, heads, tokens, head_dim)
        The last 1 to 16 tokens of each sequence: token i of T sees the keys up to ``length - T + i``. float16 or
        bfloat16 (``ml_dtypes.bfloat16``); float32 and float64 on the CPU only. NumPy, CuPy, or anything with DLPack
        or ``__cuda_array_interface__``, any strides with a contiguous last axis. head_dim is a multiple of
        8 (16 with an 8-bit cache on a GPU), at most 256 (64, 128 and 256 are fast).
    k_cache, v_cache : array, (batch, kv_heads, capacity, head_dim)
        With ``block_table``: pages, (num_pages, kv_heads, page_size, head_dim), page_size from 1 up (16,
        64, 128 and 256 are fast). q's dtype, or uint8 that holds float8_e4m3. v_cache may have another head_dim, which
        out then has (not with uint8). heads must be a multiple of kv_heads (GQA, MQA): query head h uses key/value head
        ``h // (heads // kv_heads)``.
    cache_seqlens : int32 array, (batch,), optional
        Tokens of each sequence that are valid before this call. None: the whole capacity. A GPU array is read by the
        kernel only, so that a CUDA graph can be replayed while lengths grow; the kernel clamps a length to the
        capacity. A list, an int or a NumPy array is checked first, and copied to the GPU by each call.
    block_table : int32 array, (batch, max_pages), optional
        Entry (b, i) is the page that holds the ``page_size`` tokens of sequence b from ``i * page_size`` on. Entries
        past a sequence's length are not used. A NumPy array beside device arrays is copied by each call.
    k_new, v_new : array, (batch, kv_heads, new_tokens, head_dim), optional
        New tokens in the cache's dtype, or with scales per token or block in q's. The call writes them into the caches
        from ``cache_seqlens`` on, then attends to them: the length is ``cache_seqlens + new_tokens``. ``cache_seqlens``
        is not changed. No two tokens may be appended to one slot of a page. Lengths and block table on the host are
        checked for this; on a GPU one of the tokens is lost.
    k_scale, v_scale : float32 array, (kv_heads,), or one number on the host
        With a cache of uint8: a key is ``k_scale[kv_head]`` times its float8_e4m3 elements. Scales are finite; k_scale
        is at least 0. Other shapes, in either layout: a scale per token, (batch, kv_heads, capacity), or in pages
        (num_pages, kv_heads, page_size); or a scale per block of keys (see :func:`quantize`), (batch, kv_heads,
        blocks), or in pages (num_pages, kv_heads). These scales are contiguous, lie where the cache lies, and are
        finite and above 0 for valid tokens; values are not checked. With them the call quantises a ``k_new`` in q's
        dtype and writes its scales. A token's scale maps its largest magnitude to 448. A block that the call begins
        gets 8 times that scale, so that later tokens fit. Tokens appended to an older block take the block's scale;
        magnitudes beyond 448 times the scale become 448.
    window : (left, 0), optional
        A token sees its own key and the ``left`` keys before it. Keys that no token sees are not read.
    mask : cufa.masks, optional
        In place of ``window``: causal, a window to the left, :func:`cufa.masks.streaming` (keys between the kept keys
        and the window are not read), :func:`cufa.masks.prefix`, :func:`cufa.masks.global_window` with ``right=0``, each
        with one number or one per sequence, and :func:`cufa.masks.chunks` (a GPU reads no key before the first token's
        chunk). Numbers per sequence on a GPU are read by every call and replay of a graph.
    softcap : float, optional
        Scaled scores s become ``softcap · tanh(s / softcap)``. Above 0, at most 10,000.
    scale : float, optional
        Softmax scale, finite and ≥ 0. Default 1/√head_dim.
    alibi_slopes : array, (heads,) or (batch, heads), optional
        ALiBi, as for :func:`flash_attention`; distances are those within the sequence.
    sink : array, (heads,), optional
        A logit of each query head that joins the denominator, as for :func:`flash_attention`. Sinks and slopes on a GPU
        are float32.
    score, bias : cufa.score, array, optional
        As for :func:`flash_attention`: i counts the call's tokens, j the sequence's keys, and key i + delta is token
        i's own. Not with softmax_max="bound".
    layout : "bhsd" or "bshd"
        Axis order of all arrays of four axes and of the result; "bshd" has the tokens before the heads:
        (batch, capacity, kv_heads, head_dim), (num_pages, page_size, kv_heads, head_dim).
    num_splits : int, optional
        Number of splits of each sequence. None: the planner chooses; :func:`plan_decode` prints its choice and why.
    schedule : "auto", "fixed" or "balanced"
        "fixed": the same number of splits for each sequence; "balanced": shares of all tiles, at most ``num_splits``.
        Both change the result by rounding only.
    softmax_max : "bound", number or float32 array (heads,), optional
        A maximum, fixed before the first score, that the softmax subtracts: no tile rescales earlier results
        (FlashDecoding++). "bound": an upper bound of the row's scores, the softcap or the query's norm times
        ``key_norms``. A row whose bound exceeds 42 (bfloat16 queries and caches) or 3.8 (all others), in scaled scores,
        uses its own maximum. A number, or one per query head: see :func:`calibrate_softmax_max`. If a split's sum of
        ``exp(score - softmax_max)`` leaves 2^-90 … 2^64 (bfloat16) or 2^-4 … 2^15 (all others), the row is computed
        again with its own maximum. Any number gives the same result up to rounding. Needs ``|v|`` below 9e18.
    key_norms : float32 array, (batch, kv_heads), optional
        Required with softmax_max="bound" and no softcap: an upper bound of the norms of each sequence's keys, made by
        :func:`key_norms`. The call raises it in place if a key of ``k_new`` has a larger norm.
    invariant : bool
        True: on one card the bits of a sequence's result do not depend on other sequences, ``num_splits``, the page
        size or the capacity. On a GPU they do not depend on the number of tokens per call either. Splits are chunks at
        fixed key positions, merged in order. Not with ``schedule="balanced"`` or ``softmax_max``.
    tree : int32 array (batch, tokens) or booleans (batch, tokens, tokens), optional
        The call's tokens of each sequence are a tree (speculative decoding): a token sees all keys before the tree, its
        ancestors and itself. int32: each token's parent, which precedes the token, or -1 for a root. Booleans: whether
        token i sees token j, with True on the diagonal and False above. A tree on a GPU is not checked. Not with
        windows, masks or ALiBi.
    shared_prefix : (pages, numbers), optional
        Requires ``block_table``. ``pages`` lists each prefix's pages: an int32 array (pages,) of full pages.
        ``numbers``, on the host, is each sequence's index in this list, or -1 for no prefix. ``cache_seqlens`` and
        ``block_table`` describe the tokens that follow the prefix. The prefix's pages are read once for all sequences
        that share it, in a launch of their own; results are merged in q's dtype. Not with windows, masks, ALiBi,
        ``softmax_max`` or ``invariant``.
    return_lse : bool
        Also return log-sum-exp of the scaled scores: natural log, (batch, heads, tokens),
        float32; float64 where q is.
    out : array, optional
        An array that receives the result: q's dtype, q's shape with v_cache's head_dim, NumPy or CuPy as q. It must not
        overlap an input.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed. None: on the GPU, if its kernels serve the call.

    Returns
    -------
    out, or (out, lse)
        NumPy for NumPy inputs, CuPy for device arrays. A query that sees no key gives zeros and lse = -inf (with a
        sink: lse = sink). Repeated calls with one plan give the same bits.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched or appended. Lengths and
        block tables on a GPU are not checked.

    Notes
    -----
    Launches on CuPy's current stream, and synchronises only to copy results back to NumPy. With ``out=``, all arrays on
    the GPU, and after one warm-up call, a call can be captured in a CUDA graph. Each capture has its own workspace
    (:func:`plan_decode` prints its size), which is released at the first capture after the graph is destroyed.

    ``cache_seqlens`` and ``block_table`` on a GPU must not change while the call runs: several blocks read
    them. Change them on the same stream, or between replays. Lengths that change while a call runs may also spoil
    later calls on that stream.

    On a GPU, keys and values that some query token of a sequence sees must be finite: a tile is multiplied for all
    query tokens, and 0 · inf is NaN. Slots past a sequence's length may hold any values. Scaled scores must stay within
    ±2e7 on a GPU, and denormal numbers count as 0. On CPU and GPU ``|v| * tokens`` must stay below 3.4e38.
    :func:`flash_attention` has the same limits.

    The CPU takes every combination. On a GPU (a band mask is ``causal()`` or ``window()``):

    - decode_split_tma and decode_balanced_tma (sm_90): float16, bfloat16; band masks, masks with a prefix, kept keys or
      global tokens, chunks; ALiBi, sinks and score functions; with band masks also trees.
    - decode_split and decode_balanced (sm_80 or later): float16, bfloat16; band masks, masks with a prefix, kept keys
      or global tokens, chunks; ALiBi, sinks and score functions; with band masks also trees.
    - decode_split_tma_fp8, decode_balanced_tma_fp8, decode_split_tma_fp8_scaled and decode_balanced_tma_fp8_scaled
      (sm_90): float16, bfloat16 over float8_e4m3; head dims 8 to 256, multiples of 16; band masks, masks with a prefix,
      kept keys or global tokens, chunks; ALiBi, sinks and score functions; with band masks also trees.
    - decode_split_fp8, decode_balanced_fp8, decode_split_fp8_scaled and decode_balanced_fp8_scaled (sm_89 or later):
      float16, bfloat16 over float8_e4m3; head dims 8 to 256, multiples of 16; band masks, masks with a prefix, kept
      keys or global tokens, chunks; ALiBi, sinks and score functions; with band masks also trees.

    >>> k = v = np.zeros((1, 8, 4096, 128), np.float32)
    >>> q = np.ones((1, 32, 1, 128), np.float32)
    >>> cufa.flash_decode(q, k, v, cache_seqlens=[1000]).shape
    (1, 32, 1, 128)
    """
    if unknown:
        raise unknown_keyword(flash_decode, unknown)
    if shared_prefix is not None:
        given_too = {
            "cache_seqlens": cache_seqlens, "block_table": block_table, "k_new": k_new, "v_new": v_new,
            "k_scale": k_scale, "v_scale": v_scale, "window": window, "mask": mask, "softcap": softcap, "scale": scale,
            "alibi_slopes": alibi_slopes, "sink": sink, "layout": layout, "num_splits": num_splits, "tree": tree,
            "schedule": schedule, "softmax_max": softmax_max, "key_norms": key_norms, "invariant": invariant,
            "score": score, "bias": bias,
            "device": device,
        }  # fmt: skip
        return prefixes.decode(flash_decode, q, k_cache, v_cache, shared_prefix, out, return_lse, given_too)
    if num_splits is not None and type(num_splits) is not int:
        # Checked before the warm lookup, whose keys take 2.0 for 2.
        num_splits = check_num_splits(num_splits)
    given: tuple[Any, ...] = (
        q, k_cache, v_cache, cache_seqlens, block_table, k_new, v_new, k_scale, v_scale, out, None
    )  # fmt: skip
    fixed, head_maxima = None, None
    if softmax_max is not None:
        fixed, head_maxima = option_and_array(softmax_max)
    if not (alibi_slopes is sink is key_norms is head_maxima is tree is None):
        given += alibi_slopes, sink, key_norms, head_maxima, tree, *NO_SCORE
    change = None
    if score is not None or bias is not None:
        change = resolve_score(score, bias)
        given = with_score(DECODE, given, change)
    options = (
        typed(window), mask, softcap, type(softcap), scale, type(scale), layout, num_splits, schedule, return_lse,
        device, fixed, invariant, change and change.expression,
    )  # fmt: skip
    seen, _, addresses = find(DECODE, given, options)
    if seen is not None:
        return seen(given, addresses)
    settings = _options(window, mask, softcap, scale, layout, schedule, num_splits, fixed, invariant, change)
    wanted = ("out", "lse") if check_flag("return_lse", return_lse) else ("out",)
    return run(DecodeCall.read(given, wanted, settings), device, options)


def plan_decode(
    q: Any, k_cache: Any, v_cache: Any = None, *, cache_seqlens: Any = None, block_table: Any = None,
    k_new: Any = None, k_scale: Any = None,
    dtype: npt.DTypeLike | None = None, cache_dtype: npt.DTypeLike | None = None,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    layout: Layout = "bhsd", num_splits: int | None = None, schedule: DecodeSchedule = "auto",
    softmax_max: Any = None, score: Score | None = None, bias: Any = None, invariant: bool = False,
    device: str | None = None, **unknown: Never,
) -> Plan:  # fmt: skip
    """The plan of :func:`flash_decode`: kernel, tiles, number of splits, and why. Needs no GPU and runs nothing.

    Arrays may be given as shapes, with ``k_scale`` if tokens or blocks have scales; other arguments are those of
    :func:`flash_decode`. Plans do not depend on lengths, only on whether ``cache_seqlens`` is given:
    ``cache_seqlens=True`` suffices. ``dtype`` and ``cache_dtype`` are names such as "bfloat16" and "uint8", or dtypes
    of NumPy's (default: the arrays'; for shapes bfloat16, also for the cache). ``device`` is None (what a call here
    would use), "cpu", "cuda", or an architecture such as "sm_90", planned for its typical card.

    >>> cufa.plan_decode((1, 32, 1, 128), (1, 8, 131072, 128), device="sm_90").spec.name
    'decode_split_tma'
    """
    if unknown:
        raise unknown_keyword(plan_decode, unknown)
    fixed, _ = option_and_array(softmax_max)
    change = resolve_score(score, bias)
    settings = _options(window, mask, softcap, scale, layout, schedule, num_splits, fixed, invariant, change)
    given = {"q": q, "k_cache": k_cache, "block_table": block_table, "k_new": k_new, "k_scale": k_scale}
    given["v_cache"] = k_cache if v_cache is None else v_cache
    given = {name: x if x is None or isinstance(x, tuple) else as_array(name, x) for name, x in given.items()}
    shapes = {name: getattr(x, "shape", x) for name, x in given.items()}
    shapes["v_new"] = shapes["k_new"]
    shapes["cache_seqlens"] = None if cache_seqlens is None else ()
    q_dtype = asked_dtype(getattr(given["q"], "dtype", "bfloat16") if dtype is None else dtype)
    optional = {name: x for name, x in (("alibi_slopes", alibi_slopes), ("sink", sink)) if x is not None}
    kv_dtype = asked_dtype(
        getattr(given["k_cache"], "dtype", q_dtype) if cache_dtype is None else cache_dtype
    )

    # Device arrays: the call cannot run on the CPU.
    stays = any(is_device_array(x) for x in given.values())

    def planned(found: Device | None) -> Plan:
        module = "cupy" if stays else "numpy"
        names = dtypes(q_dtype, {"k_cache": kv_dtype}, on_gpu=found is not None, module=module)
        fine = names[0] != names[1] and len(shapes["k_scale"] or ()) > 1
        quantize_new = fine and str(getattr(given["k_new"], "dtype", q_dtype)) == q_dtype
        problem = optional_operands.planned(
            optional, make_decode_problem(shapes, *names, settings, quantize_new)
        )
        if fine:
            mode = scale_mode(shapes["k_scale"], shapes["k_cache"], problem, layout)
            problem = dataclasses.replace(problem, scales=("", mode, mode))
        if found is not None:
            check_gpu_serves(problem)
        return plan_for(problem, found, settings)

    found = planning_device(device, served=True)
    try:
        return planned(found)
    except (TypeError, ValueError):
        if device is not None or found is None or stays:
            raise
        return planned(None)  # as a call with NumPy arrays would do


def _options(
    window: Any, mask: Any, softcap: Any, scale: Any, layout: Any, schedule: Any, num_splits: Any, fixed: Any,
    invariant: Any, score: Score | None,
) -> Options:  # fmt: skip
    check_choice("schedule", schedule, {x: repr(x) for x in ("auto", "fixed", "balanced")})
    found = decode_mask(window, mask)
    fixed = "heads" if fixed == "heads" else check_softmax_max(fixed)
    if check_flag("invariant", invariant) and schedule == "balanced":
        raise ValueError(
            "schedule='balanced' with invariant=True: balanced shares depend on all sequences of the batch; leave "
            "schedule out"
        )
    if score is not None and fixed == "bound":
        raise ValueError(
            "softmax_max='bound' with score= or bias=: the norms of queries and keys do not bound a changed score; "
            "leave softmax_max out, or pass numbers"
        )
    return Options(
        found, softcap, scale, None, layout, str(schedule), num_splits, softmax_max=fixed, invariant=invariant,
        score=score,
    )  # fmt: skip
