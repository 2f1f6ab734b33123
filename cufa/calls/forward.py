"""Forward attention: :func:`flash_attention` and :func:`plan`. Checks are in :mod:`cufa.calls.call`, running in
:mod:`cufa.calls.dispatch`, choices in :mod:`cufa.plan.planner`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Never, Unpack, overload

import numpy.typing as npt

from ..plan.dense import FORWARD
from ..plan.planner import Plan
from ..problem.checks import check_choice, check_flag
from ..problem.dropout import check_dropout, resolve_dropout
from ..problem.float8 import NAME, is_float8
from ..problem.options import Options, check_causal, check_num_splits, read_forward
from ..problem.score_function import Score, resolve_score
from ..problem.typing import (
    Accumulate,
    Algorithm,
    AnyMask,
    Array,
    ForwardOptions,
    Layout,
    Lse,
    Off,
    On,
    OutDtype,
    Place,
    Precision,
    ScaledOptions,
)
from .call import ForwardCall
from .dispatch import no_scaled_cache, plan_shapes, run
from .keywords import unknown_keyword
from .quantize import QuantizedValues
from .score_operands import refuse_score, with_score, with_seed
from .warm import find, typed


@overload
def flash_attention(
    q: Array, k: Any, v: Any, *, return_lse: Off = ..., **options: Unpack[ForwardOptions]
) -> Array: ...
@overload
def flash_attention(
    q: Array, k: Any, v: Any, *, return_lse: On, **options: Unpack[ForwardOptions]
) -> tuple[Array, Lse]: ...
@overload
def flash_attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = ..., **options: Unpack[ScaledOptions]
) -> Any: ...
def flash_attention(
    q: Any, k: Any, v: Any, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens_q: Any = None, seqlens_k: Any = None, score: Score | None = None, bias: Any = None,
    dropout: float | None = None, seed: Any = None,
    cache_seqlens: Any = None, block_table: Any = None, k_new: Any = None, v_new: Any = None,
    tree: Any = None, invariant: bool = False,
    layout: Layout = "bhsd", algorithm: Algorithm = "auto", num_splits: int | None = None,
    precision: Precision | None = None,
    q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, out_dtype: OutDtype | None = None,
    accumulate: Accumulate | None = None,
    return_lse: bool = False, out: Any = None, lse: Any = None, device: Place | None = None, **unknown: Never,
) -> Any:  # fmt: skip
    """Exact attention, ``softmax(scale * q kᵀ) v``, without ever storing the score matrix. For gradients see
    :func:`flash_attention_backward`.

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
        head ``h // (heads // kv_heads)`` (GQA, MQA), never copied. v may have another head_dim, which out then has.
    causal : bool
        Query i sees keys up to ``i + seqlen_k - seqlen_q``: aligned bottom-right, so that the last query
        sees the last key, as decoding with a cache needs. (PyTorch's ``is_causal`` is aligned top-left:
        the two agree when seqlen_q == seqlen_k.)
    window : (left, right), optional
        Query i sees keys ``i + δ - left`` to ``i + δ + right``, both included, δ = seqlen_k - seqlen_q; None
        is unbounded. With ``causal=True`` right must be 0 or None, which then means 0: ``(3, 4)`` is refused. Tiles
        outside the window are neither read nor computed.
    mask : cufa.masks, or array of bool, optional
        A mask of :mod:`cufa.masks`, or booleans that are True where a query sees a key, in place of ``causal`` and
        ``window``. Booleans are (seqlen_q, seqlen_k) or (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), with
        heads of q or of k. Every call reads booleans anew; :func:`cufa.masks.from_dense` reads a matrix once. A
        builder's mask may differ between key/value heads; booleans and functions of :func:`cufa.masks.where` may also
        differ between query heads. Each builder says when arrays on a GPU are read: once, when the mask is made, or by
        every call and replay of a graph, so that their owner may change them.
    softcap : float, optional
        Scaled scores s become ``softcap · tanh(s / softcap)`` before the mask (Gemma 2). Above 0, at most
        10,000.
    scale : float, optional
        Softmax scale, finite and ≥ 0. Default 1/√head_dim.
    alibi_slopes : array, (heads,) or (batch, heads), optional
        ``slope · |i + δ - j|`` is subtracted from the score of query i and key j, after the soft cap (ALiBi, Press et
        al., 2022, section 3). δ is the mask's diagonal, by default seqlen_k - seqlen_q. Slopes of any sign; finite ones
        beyond ±1e30 behave as ±1e30.
    sink : array, (heads,), optional
        A logit of each query head that joins the softmax denominator of every row, after the mask; lse includes it
        (gpt-oss). It has no value vector. A row that sees no key gives zeros and lse = sink. -inf: no sink. Finite
        sinks beyond ±1e30 behave as ±1e30.
    seqlens_q, seqlens_k : int32 array, (batch,), optional
        Sequence b is the first ``seqlens_q[b]`` queries and the first ``seqlens_k[b]`` keys of batch entry b. The
        padding after them is ignored; it may contain NaN, and its rows give zeros and lse = -inf. Masks are aligned to
        each sequence: its last query has the position of its last key. Of a mask with values for each key, or for each
        query and key, a sequence has the first ones. For concatenated sequences see :func:`flash_attention_varlen`.
        Lengths on a GPU are read by kernels only, unchecked: their owner may change them between calls and between
        replays of a graph. Lengths on the host are checked, and copied by each call.
    score : cufa.score, optional
        A change of scaled scores, written in NumPy: :func:`cufa.score`. It is applied before the soft cap. With a
        cache, i counts the queries of the call: key i + delta is query i's own.
    bias : array, (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), optional
        Added to scaled scores, in place of ``score``: any float dtype and strides, read in place.
    dropout : float, optional
        Probability with which each weight is dropped, from 0 to below 1, rounded to a multiple of 1/256 (above 0: at
        least 1/256). Kept weights are multiplied by 1 / (1 - dropout); lse includes dropped weights. Which weights are
        kept depends on seed, sequence, query head and the positions of query and key in their sequence only:
        :func:`dropout_mask`. Not with keys in a cache.
    seed : int, or array of two 64-bit integers, optional
        The key of dropout's generator (Philox4x32-7), from 0 to 2**64 - 1. An array holds (seed, number): calls whose
        numbers differ in the low 32 bits drop different weights. An array on the GPU is read by kernels only: its owner
        may change it between calls and replays of a graph, but only after the backward has run. An int is copied by
        each call.
    cache_seqlens : int32 array, (batch,), optional
        k and v are a cache, in which sequence b has ``cache_seqlens[b]`` keys before this call; None with
        ``block_table``: the cache is full. Not together with ``seqlens_k``. Masks are aligned to each sequence: its
        last query has the position of its last key. Slots past a sequence's keys may hold NaN. The mask must
        fit any length: a band, also with exempt tokens, or chunks. GPU: float16 and bfloat16.
    block_table : int32 array, (batch, max_pages), optional
        k and v are pages, (num_pages, kv_heads, page_size, head_dim): entry (b, i) is the page with the ``page_size``
        keys of sequence b from ``i * page_size`` on. Entries that no query sees are not used. FA3 takes pages of
        multiples of 8 keys, FA2 any. Lengths and tables on a GPU are read by kernels only, unchecked.
    k_new, v_new : array, (batch, kv_heads, seqlen_q, head_dim), optional
        A key and value of each query, which the call first writes into the cache, from ``cache_seqlens[b]`` on; with
        ``seqlens_q`` the first ``seqlens_q[b]`` of them.
    tree : int32 array, (batch, tokens), or bool array, (batch, tokens, tokens), optional
        With a cache: the queries of a sequence, at most 64, are a tree's tokens, as speculative decoding checks them.
        A token sees all keys before the new tokens, its ancestors and itself. int32: each token's parent, which
        precedes the token, or -1 for a root. Booleans: whether token i sees token j, with True on the diagonal and
        False above. Not with windows, masks or ALiBi. A tree on a GPU is not checked.
    invariant : bool
        With a cache, on a GPU. True: on one card, three things do not change the bits of a query's result: other
        sequences, the page size, and the number of queries per call (chunks of a prompt, or one by one). FA3, FA2 and
        :func:`flash_decode` give different bits, and the page size may decide between FA3 and FA2.
    layout : "bhsd" or "bshd"
        Axis order of q, k, v and the result: (batch, heads, seqlen, head_dim), or with seqlen before heads.
    algorithm : "auto", "fa3", "fa2", "fa2_noskip", "fa1" or "naive"
        "auto" takes the kernel that recorded benchmarks found fastest for this class of problem on this GPU. Without a
        measurement it takes the first kernel of the registry that serves the call: FA3 on Hopper, else FA2.
    num_splits : int, optional
        Thread blocks of a GPU that share the keys of each query block. Their partial results are merged in the order
        of the keys: every run gives the same bits. None: the planner decides; it splits only if queries are too few to
        fill the GPU. At most one split per key tile. FA3's kernels, and FA2's for float16 and bfloat16, split keys,
        except with invariant; the CPU does not.
    precision : None, "float32" or "tf32"
        For float32 inputs on a GPU. None keeps float32 accuracy, unless ``CUPY_TF32=1`` is set.
    q_scale, k_scale, v_scale : float32 array, optional
        With q, k and v of float8_e4m3 (``ml_dtypes.float8_e4m3fn``, or its bytes as uint8): a query is ``q_scale`` ·
        q. Positive and finite (on a GPU not checked); the shapes are those of :func:`quantize`, but v takes no scale
        per token. head_dim is a multiple of 16. v is an array, which a GPU transposes in each call, or
        :class:`QuantizedValues`, whose own scale is the default. See the notes for accuracy and GPUs.
        With q of 16 bits, k and v may be float8_e4m3 in rows, not transposed, with ``k_scale`` and ``v_scale`` in the
        shapes of ``quantize(role="k")``: a launch before attention converts them to q's dtype. A graph cannot capture
        such a call.
    out_dtype : None, "bfloat16", "float16" or "float32"
        dtype of the result with q of float8_e4m3. None: bfloat16.
    accumulate : None, "tile", "row" or int, optional
        With q of float8_e4m3 on a GPU: how often P V is added to the result in float32: after each "tile" of keys,
        after a number of tiles, or after the last tile of a "row". In between, Hopper's tensor cores add, with about 14
        bits. None: "tile" from 65,536 keys on, else "row". A number means "tile" for head dims over 128 and with a soft
        cap. The kernel fa2_forward_fp8 always adds after each tile.
    return_lse : bool
        Also return log-sum-exp of the scaled scores: natural log, (batch, heads, seqlen_q),
        float32; float64 where q is.
    out : array, optional
        An array that receives the result: q's dtype, q's shape with v's head_dim, NumPy or CuPy as q. It must not
        overlap an input.
    lse : array, optional
        A contiguous array that receives lse, with ``return_lse=True``: lse's shape and dtype, NumPy or CuPy as q.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed. None: on the GPU, if its kernels serve the call. Device arrays are computed on
        their own GPU.

    Returns
    -------
    out, or (out, lse)
        NumPy for NumPy inputs, CuPy for device arrays. A query that sees no key gives zeros and lse = -inf.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched.

    Notes
    -----
    Launches on CuPy's current stream, and synchronises only to copy results back to NumPy. With ``out=`` and after one
    warm-up call, a call can be captured in a CUDA graph.

    With inputs of float8_e4m3, weights are rounded to e4m3 too, relative to their row's maximum up to and including
    their tile of keys. Tiles go from the last key to the first; sums are float32 (on a GPU see ``accumulate``). For
    standard normal inputs this adds an error of 2 to 3% of the result's norm to the error of quantised inputs. A GPU
    takes scales of q and k per tensor, head or block, and scales of v per tensor or head; it writes bfloat16 or
    float16.

    The CPU takes every combination. On a GPU (a band mask is ``full()``, ``causal()`` or ``window()``):

    - fa3_forward (sm_90): float16, bfloat16; all masks; padded lengths, packed lengths, caches, ALiBi, sinks, score
      functions and dropout; with band masks also trees.
    - fa3_forward_fp8 (sm_90): float8_e4m3; head dims 16 to 256, multiples of 16; band masks; padded lengths and packed
      lengths.
    - fa2_forward (sm_80 or later): float16, bfloat16; all masks; padded lengths, packed lengths, caches, ALiBi, sinks,
      score functions and dropout; with band masks also trees.
    - fa2_forward_fp8 (sm_89 or later): float8_e4m3; head dims 16 to 256, multiples of 16; band masks; padded lengths
      and packed lengths.
    - fa2_forward_f32 (sm_80 or later): float32, tf32; all masks; padded lengths, packed lengths, ALiBi, sinks, score
      functions and dropout.
    - fa1_forward (sm_80 or later): float16, bfloat16; head dims 8 to 256, multiples of 8; band masks.
    - fa1_forward_f32 (sm_80 or later): float32, tf32; head dims 8 to 256, multiples of 8; band masks.
    - naive (sm_80 or later): float16, bfloat16, float32, tf32; all masks; score functions and dropout.

    On a GPU, keys and values that the mask hides from a query must still be finite: a tile with visible and hidden
    scores is multiplied as a whole, and 0 · inf is NaN.

    Scores are float32. On a GPU, scale * q kᵀ must stay within ±2e7: exponentials of larger scores overflow, and their
    rows are NaN. (Beyond ±2e7 the spacing of float32 exceeds 1, so that softmax has no accuracy left.)
    ``algorithm="naive"`` and the CPU take the range of float32.

    Values are multiplied by weights up to 1 and divided by the weights' sum at the end: |v| * seqlen_k must stay below
    3.4e38. A GPU rounds weights to 16 bits, but not their sum: float16 values up to ±65,472 give finite results.

    On a GPU, denormal float32 and bfloat16 values (below 1.2e-38 in magnitude) are read and written as 0. Denormal
    float16 values are kept.
    """
    if unknown:
        raise unknown_keyword(flash_attention, unknown)
    if type(causal) is not bool:  # before the warm lookup, whose keys take 1.0 for True
        causal = check_causal(causal)  # type: ignore[unreachable]
    changes = None  # most calls pass none of these options: their lookup key stays short
    given: tuple[Any, ...] = q, k, v, out, lse
    if window is not None or mask is not None or softcap is not None:
        plain = mask is None and softcap is None
        changes = typed(window) if plain else (typed(window), mask, softcap, type(softcap))
    if alibi_slopes is not None or sink is not None or seqlens_q is not None or seqlens_k is not None:
        given += alibi_slopes, sink, seqlens_q, seqlens_k
    if not (cache_seqlens is block_table is k_new is v_new is tree is None):
        given = q, k, v, out, lse, alibi_slopes, sink, seqlens_q, seqlens_k, None, None
        given += cache_seqlens, block_table, k_new, v_new, tree
    change = None
    if score is not None or bias is not None:
        change = resolve_score(score, bias)
        given = with_score(FORWARD, given, change)
    dropped = 0
    if dropout is not None or seed is not None:
        dropped, seed = resolve_dropout(dropout, seed)
        given = with_seed(FORWARD, given, seed)
    if num_splits is not None and type(num_splits) is not int:
        num_splits = check_num_splits(num_splits)  # before the warm lookup, whose keys take 1.0 for 1
    if type(invariant) is not bool:
        invariant = check_flag("invariant", invariant)  # type: ignore[unreachable]
    options = (
        causal, scale, type(scale), layout, algorithm, num_splits, precision, return_lse, device, changes,
        change and change.expression, invariant, dropped,
    )  # fmt: skip
    scaled = q_scale is not None or k_scale is not None or v_scale is not None or out_dtype is not None
    scaled = scaled or accumulate is not None
    if not scaled:
        seen, _, addresses = find(FORWARD, given, options)
        if seen is not None:
            return seen(given, addresses)
    in_cache = not (cache_seqlens is block_table is k_new is v_new is tree is None)
    if in_cache and (scaled or is_float8(q) or is_float8(k)):
        raise no_scaled_cache()
    if invariant and not in_cache:
        raise invariant_without_cache()
    if k_scale is not None and is_float8(k) and not is_float8(q):
        from .widened import keys_and_values

        refused = {"q_scale": q_scale, "out_dtype": out_dtype, "accumulate": accumulate}
        given = q, *keys_and_values(q, k, v, (k_scale, v_scale), layout, refused), *given[3:]
        scaled = False
    arguments = (
        return_lse, causal, window, mask, softcap, scale, precision, layout, algorithm, num_splits
    )  # fmt: skip
    if scaled or is_float8(q):
        from .float8 import Float8Call

        refuse_score(change, q, dropped)
        given = q, k, v, out, lse, alibi_slopes, sink, seqlens_q, seqlens_k
        return Float8Call.result(
            given, (q_scale, k_scale, v_scale), out_dtype, accumulate, arguments, device, options
        )
    read = read_forward(*arguments, score=change, invariant=invariant, dropped=dropped)
    return run(ForwardCall.read(given, *read), device, options)


def invariant_without_cache() -> ValueError:
    return ValueError(
        "invariant=True without cache_seqlens or block_table: it is about keys in a cache; leave it out"
    )


def plan(
    q: Any, k: Any = None, v: Any = None, *, dtype: npt.DTypeLike | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens_q: Any = None, seqlens_k: Any = None, score: Score | None = None, bias: Any = None,
    dropout: float | None = None,
    cache_seqlens: Any = None, block_table: Any = None, k_new: Any = None, v_new: Any = None, tree: Any = None,
    invariant: bool = False,
    layout: Layout = "bhsd", algorithm: Algorithm = "auto", num_splits: int | None = None,
    precision: Precision | None = None, kv_dtype: str | None = None,
    device: str | None = None, **unknown: Never,
) -> Plan:  # fmt: skip
    """The plan of :func:`flash_attention`: kernel, tiles, launches, workspace in bytes, and why. Needs no GPU and runs
    nothing. For :func:`flash_decode` see :func:`plan_decode`.

    q, k and v are arrays or shapes; k and v default to q. ``alibi_slopes`` and ``sink`` may be True in place of an
    array; ``block_table``, ``k_new``, ``v_new`` and ``tree`` may be shapes. ``dtype`` is a name such as "float16", or a
    dtype of NumPy's (default: the arrays', or bfloat16 for shapes); "float8_e4m3" is planned with scales per head,
    transposed values and bfloat16 results. ``kv_dtype="float8_e4m3"``: keys and values of e4m3 under 16-bit queries.
    ``device`` is None (the device that a call here would use), "cpu", "cuda", or an architecture such as "sm_90",
    planned for its typical card. All other arguments, and errors, are as for :func:`flash_attention`.

    >>> cufa.plan((1, 8, 4096, 128), causal=True, device="sm_90").spec.name
    'fa3_forward'
    """
    if unknown:
        raise unknown_keyword(plan, unknown)
    options = Options.of(
        causal, window, mask, softcap, scale, precision, layout, algorithm, num_splits,
        score=None if score is bias is None else resolve_score(score, bias),
        invariant=check_flag("invariant", invariant), dropped=0 if dropout is None else check_dropout(dropout),
    )  # fmt: skip
    optional = {"alibi_slopes": alibi_slopes, "sink": sink, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    cache = {
        "cache_seqlens": cache_seqlens, "block_table": block_table, "k_new": k_new, "v_new": v_new, "tree": tree
    }  # fmt: skip
    cache = {name: x for name, x in cache.items() if x is not None}
    if invariant and not cache:
        raise invariant_without_cache()
    if kv_dtype is not None and cache:
        raise no_scaled_cache()
    optional |= cache
    v = v.shape if isinstance(v, QuantizedValues) else v
    found = plan_shapes(q, k, v, dtype, device, options, optional)
    if kv_dtype is None:
        return found
    check_choice("kv_dtype", kv_dtype, {NAME: repr(NAME)})
    problem = found.problem
    if problem.dtype == NAME:
        raise ValueError(f"kv_dtype={kv_dtype!r} with q of {NAME}: leave it out")
    from .widened import REASON

    size = 2 * math.prod(problem.shapes[1]) * problem.itemsize
    return dataclasses.replace(
        found, reasons=(*found.reasons, REASON.format(dtype=problem.dtype, bytes=size))
    )
