"""The public calls of :mod:`cufa.parallel`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..masks import documents
from ..problem.checks import check_flag, module_of
from ..problem.mask import Mask
from ..problem.options import resolve_mask
from .arguments import Arguments
from .backward import Backward
from .compute import Scores
from .forward import Forward
from .group import Group, exchange
from .run import on_device


def flash_attention(
    q: Any, k: Any, v: Any, *, group: Group, placement: Any = "contiguous", scheme: str = "auto",
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: Mask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens: Any = None, layout: str = "bhsd", algorithm: str = "auto", precision: str | None = None,
    return_lse: bool = False, device: str | None = None,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention` over sequences whose tokens, or heads, are spread over the ranks of a group.

    Parameters
    ----------
    q, k, v : array, (batch, heads, local tokens, head_dim), or a list of them
        This rank's **local part**; with a group whose ranks are all in this process a list with the part of each rank.
        Parts may be empty. :func:`distribute` makes them of whole arrays.
    group : Group
    placement : "contiguous", "zigzag", "heads" or Placement
        Which tokens a part holds (:class:`Placement`). "heads": all tokens of some heads, in whole query groups.
        "contiguous" parts may have any lengths. For masks of documents take :meth:`Placement.documents`: ranks hold
        whole documents and do equal work. Keys have the placement of queries.
    scheme : "auto", "heads", "ulysses", "zigzag", "allgather" or "2d"
        "auto": the placement's own scheme for "heads", and for "zigzag" under full or causal masks; "zigzag" for
        documents placed by :meth:`Placement.documents`; else "ulysses" if the ranks divide the key/value heads, "2d" if
        a factor of the ranks does, else "allgather". "zigzag": keys travel, and float32 partial results are joined by
        their log-sum-exp. "ulysses": a rank computes some heads of
        all tokens. "allgather": a rank gathers the keys that its queries see. "2d": "ulysses" among some ranks,
        "allgather" among the others. Blocks of 128 keys that the mask hides never travel.
    causal, window, mask, softcap, scale, algorithm, precision, device
        As for :func:`cufa.flash_attention`, for the whole sequence. Arrays of a mask are on the host.
    alibi_slopes, sink
        As for :func:`cufa.flash_attention`, for the query heads of the rank's q. With a group in one process: one
        array for all ranks, or a list with the array of each rank. Arrays on several GPUs need the list, and so does
        placement "heads", whose ranks hold different heads.
    seqlens : integers, (batch,), optional
        Sequence b is the first ``seqlens[b]`` queries and keys of batch entry b; q and k have equal lengths. On a GPU
        the padding must be finite. Rows of padding give zeros and lse = -inf.
    layout, return_lse
        As for :func:`cufa.flash_attention`.

    Returns
    -------
    out, or (out, lse)
        Local parts. With "heads" and "ulysses" the same bits as one GPU, if the planner takes the same tiles for a
        rank's heads. With "zigzag" within float32 rounding, before the last rounding to q's dtype (gradients: see
        :func:`flash_attention_backward`). Repeated calls give the same bits.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched or sent.

    Notes
    -----
    Asynchronous as :func:`cufa.flash_attention`. Copies run beside the kernels of the previous step: between GPUs of
    one process on copy engines, between processes by NCCL.
    """
    given = {"q": q, "k": k, "v": v}
    call = Arguments.read(group, given, placement, scheme, layout, alibi_slopes, sink)
    whole = call.mask(resolve_mask(causal, window, mask), seqlens)
    schedule = call.schedule(whole, False)
    scores = Scores(scale, softcap, call.alibi_slopes, call.sink, algorithm, precision, device=device)
    run = Forward(group, schedule, call.given, scores)
    run.run()
    out = group.returned(call.in_layout(run.out))
    return (out, group.returned(run.lse)) if return_lse else out


def flash_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, group: Group, placement: Any = "contiguous",
    scheme: str = "auto", causal: bool = False, window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None, softcap: float | None = None, scale: float | None = None,
    alibi_slopes: Any = None, sink: Any = None, seqlens: Any = None, dlse: Any = None, layout: str = "bhsd",
    algorithm: str = "auto", precision: str | None = None, deterministic: bool = False,
    device: str | None = None,
) -> Any:  # fmt: skip
    """Gradients of :func:`flash_attention`: local parts of dq, dk and dv; with ``sink=`` also dsink of the rank's query
    heads, summed over the tokens of all ranks.

    ``dout``, ``out``, ``lse`` and ``dlse`` are local parts, as the forward returns them; the other arguments and errors
    are as for :func:`flash_attention`. Where several calls contribute to a gradient, their shares are float32, travel
    as such and are added in a fixed order. Only the sum is rounded to q's dtype: the error is that of one GPU.
    """
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    call = Arguments.read(group, given, placement, scheme, layout, alibi_slopes, sink)
    schedule = call.schedule(call.mask(resolve_mask(causal, window, mask), seqlens), True)
    deterministic = check_flag("deterministic", deterministic)
    scores = Scores(scale, softcap, call.alibi_slopes, call.sink, algorithm, precision, deterministic, device)
    run = Backward(group, schedule, call.given, scores)
    run.run()
    gradients = []
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        totals = {}
        for rank in group.local:
            with group.on(rank):
                totals[rank] = run.sums[rank, name].total(call.given[like][rank].dtype)
        gradients.append(group.returned(call.in_layout(totals)))
    if call.sink:
        gradients.append(_dsink(call))
    return tuple(gradients)


def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens: Any, *, group: Group, causal: bool = False, return_lse: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention_varlen` over packed sequences whose rows are spread over ranks. A part may begin or
    end inside a sequence.

    q, k and v are local parts (rows, heads, head_dim) of one packed array; ``cu_seqlens`` are its cumulative lengths
    on the host, for queries and keys alike. Rows after the last sequence are padding; on a GPU they must be finite.
    ``placement=Placement.documents(lengths, P)`` gives each rank whole sequences, if there is no padding.
    ``options`` are those of :func:`flash_attention` except masks and lengths. Returns parts (rows, heads, head_dim),
    and lse (heads, rows).
    """
    dense = [_packed(group, name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    mask = _packed_mask(group, dense[0], cu_seqlens, causal)
    results = flash_attention(*dense, group=group, mask=mask, layout="bshd", return_lse=return_lse, **options)
    return _unpacked(group, results)


def flash_attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seqlens: Any, *, group: Group,
    causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Gradients of :func:`flash_attention_varlen`, with the arguments of :func:`flash_attention_backward`."""
    names = ("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)
    dense = [_packed(group, name, x) for name, x in names]
    if options.get("dlse") is not None:
        options["dlse"] = _packed(group, "dlse", options["dlse"])
    mask = _packed_mask(group, dense[1], cu_seqlens, causal)
    gradients = flash_attention_backward(*dense, group=group, mask=mask, layout="bshd", **options)
    return (*_unpacked(group, gradients[:3]), *gradients[3:])


def _packed(group: Group, name: str, x: Any) -> Any:
    return group.returned({rank: part[None] for rank, part in group.parts(name, x).items()})


def _unpacked(group: Group, results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(_unpacked(group, x) for x in results)
    return [x[0] for x in results] if group.one_process else results[0]


def _packed_mask(group: Group, q: Any, cu_seqlens: Any, causal: bool) -> Mask:
    """The mask of packed sequences over all rows of the group."""
    starts = np.asarray(cu_seqlens)
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or not len(starts) or starts[0] != 0:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens!r}: it takes cumulative lengths of whole sequences on the host, from 0 on"
        )
    parts = group.parts("q", q)
    total = sum(x[0] for x in group.gather({rank: [part.shape[1]] for rank, part in parts.items()}))
    return documents(np.diff(starts), causal=causal, seqlen=total)


def _dsink(call: Arguments) -> Any:
    """The gradient of each head's sink: the sum of -exp(sink - lse) (rowsum(dout ∘ out) - dlse) over all rows.
    Unless ranks hold different heads, every rank adds the shares of all ranks, in the order of ranks."""
    group, shares, every = call.group, {}, {}
    for rank in group.local:
        with group.on(rank):
            lse = call.given["lse"][rank]
            xp = module_of(lse)
            dout, out = (call.given[name][rank].astype(lse.dtype) for name in ("dout", "out"))
            delta = (dout * out).sum(axis=-1)
            if call.given["dlse"]:
                delta = delta - call.given["dlse"][rank]
            logit = on_device(call.sink[rank], lse)[:, None]
            weight = xp.where(xp.isfinite(logit) & xp.isfinite(lse), xp.exp(logit - lse), 0)
            shares[rank] = -(weight * delta).sum(axis=(0, 2))
            every[rank] = xp.empty((group.size, *shares[rank].shape), lse.dtype)
            every[rank][rank] = shares[rank]
    if call.queries.kind == "heads":
        return group.returned(shares)
    exchange(group, every)
    sums = {}
    for rank, x in every.items():
        with group.on(rank):
            sums[rank] = x.sum(axis=0)
    return group.returned(sums)
