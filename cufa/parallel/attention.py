"""The public calls of :mod:`cufa.parallel`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..calls.shapes import LAYOUTS
from ..masks import documents
from ..problem.checks import as_array, check_choice, is_device_array
from ..problem.columns import TO_THE_END, Columns
from ..problem.integers import Integers
from ..problem.mask import Band, Mask
from ..problem.options import Options, resolve_mask
from .compute import Scores
from .group import Group, module_of
from .placement import Placement, resolve
from .run import Backward, Forward, on_device
from .schedule import Schedule, make_schedule
from .slices import Whole

_NAMES = {"forward": ("q", "k", "v"), "backward": ("dout", "q", "k", "v", "out", "lse", "dlse")}


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
        Which tokens a part has, :class:`Placement`; "heads": all tokens of some heads, with the query heads of whole
        query groups. "contiguous" parts may have any lengths. Keys have the placement of queries.
    scheme : "auto", "heads", "ulysses", "zigzag", "allgather" or "2d"
        "auto" takes a valid one: "heads" for heads; "zigzag" (keys travel; parts are joined by their log-sum-exp in
        float32) for that placement under full or causal masks; else "ulysses" (every rank computes some heads of all
        tokens) if the ranks divide the key/value heads, "2d" (Ulysses among some ranks, all keys gathered among the
        others) if some factor does, else "allgather" of the keys that the mask lets the rank's queries see. Keys that
        the mask hides never travel, in blocks of 128.
    causal, window, mask, softcap, scale, algorithm, precision, device
        As for :func:`cufa.flash_attention`, of the whole sequence. Arrays of a mask are on the host.
    alibi_slopes, sink
        As there, of all heads on every rank; with placement "heads" those of the rank's heads.
    seqlens : integers, (batch,), optional
        Sequence b is the first ``seqlens[b]`` queries and keys of batch entry b, which have equal lengths. The padding
        must be finite on a GPU. Its rows give zeros and lse = -inf.
    layout, return_lse
        As for :func:`cufa.flash_attention`.

    Returns
    -------
    out, or (out, lse)
        Local parts. With "heads" and "ulysses" the same bits as one GPU, if the planner takes the same tiles for a
        rank's heads. With "zigzag" within float32 rounding, before the last rounding to q's dtype. Repeated calls give
        the same bits.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure; nothing has been launched or sent.

    Notes
    -----
    Asynchronous as :func:`cufa.flash_attention`. Copies run beside the kernels of the step before: between GPUs of one
    process on copy engines, between processes by NCCL.
    """
    given = {"q": q, "k": k, "v": v}
    call = _Call.read(group, given, placement, scheme, layout, alibi_slopes, sink)
    whole = call.mask(resolve_mask(causal, window, mask), seqlens)
    schedule = call.schedule(whole, False)
    scores = call.scores(scale, softcap, algorithm, precision, device)
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
    """Gradients of :func:`flash_attention`: local parts of dq, dk and dv, and with ``sink=`` dsink, whose sum over all
    tokens every rank gets.

    ``dout``, ``out``, ``lse`` and ``dlse`` are local parts, as the forward returns them; the other arguments and errors
    are as for :func:`flash_attention`. Contributions of several calls to a gradient are added in float32, in an order
    that does not depend on time.
    """
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    call = _Call.read(group, given, placement, scheme, layout, alibi_slopes, sink)
    schedule = call.schedule(call.mask(resolve_mask(causal, window, mask), seqlens), True)
    scores = dataclasses.replace(
        call.scores(scale, softcap, algorithm, precision, device), deterministic=deterministic
    )
    run = Backward(group, schedule, call.given, scores)
    run.run()
    found = []
    for name in ("dq", "dk", "dv"):
        totals = {}
        for rank in group.local:
            with group.on(rank):
                totals[rank] = run.sums[rank, name].total()
        found.append(group.returned(call.in_layout(totals)))
    if sink is not None:
        found.append(_dsink(call, sink))
    return tuple(found)


def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens: Any, *, group: Group, causal: bool = False, return_lse: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention_varlen` over packed sequences whose rows are spread over ranks, wherever sequences
    begin.

    q, k and v are local parts (rows, heads, head_dim) of one packed array; ``cu_seqlens`` are its cumulative lengths,
    of queries and of keys, on the host. Rows after the last sequence are padding; on a GPU they must be finite.
    ``options`` are those of :func:`flash_attention` except masks and lengths. Returns parts (rows, heads, head_dim),
    and lse of (heads, rows).
    """
    dense = [_packed(group, name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    mask = _of_sequences(group, dense[0], cu_seqlens, causal)
    found = flash_attention(*dense, group=group, mask=mask, layout="bshd", return_lse=return_lse, **options)
    return _unpacked(group, found)


def flash_attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_seqlens: Any, *, group: Group,
    causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Gradients of :func:`flash_attention_varlen`, with the arguments of :func:`flash_attention_backward`."""
    names = ("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)
    dense = [_packed(group, name, x) for name, x in names]
    if options.get("dlse") is not None:
        options["dlse"] = _packed(group, "dlse", options["dlse"])
    mask = _of_sequences(group, dense[1], cu_seqlens, causal)
    found = flash_attention_backward(*dense, group=group, mask=mask, layout="bshd", **options)
    return (*_unpacked(group, found[:3]), *found[3:])


def _packed(group: Group, name: str, x: Any) -> Any:
    return group.returned({rank: part[None] for rank, part in group.parts(name, x).items()})


def _unpacked(group: Group, found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(_unpacked(group, x) for x in found)
    return [x[0] for x in found] if group.one_process else found[0]


def _of_sequences(group: Group, q: Any, cu_seqlens: Any, causal: bool) -> Mask:
    """The mask of packed sequences over all rows of the group."""
    starts = np.asarray(cu_seqlens)
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or not len(starts) or starts[0] != 0:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens!r}: it takes cumulative lengths of whole sequences on the host, from 0 on"
        )
    parts = group.parts("q", q)
    total = sum(x[0] for x in group.gather({rank: [part.shape[1]] for rank, part in parts.items()}))
    return documents(np.diff(starts), causal=causal, seqlen=total)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a parallel call, read and checked."""

    group: Group
    given: dict[str, dict[int, Any]]
    """Local parts by name and rank, axes (batch, heads, tokens, head_dim); empty for what was left out."""
    queries: Placement
    keys: Placement
    scheme: str
    layout: str
    alibi_slopes: Any
    sink: Any

    @classmethod
    def read(
        cls, group: Group, given: dict[str, Any], placement: Any, scheme: str, layout: str, slopes: Any,
        sink: Any,
    ) -> _Call:  # fmt: skip
        check_choice("layout", layout, {name: repr(name) for name in LAYOUTS})
        if not isinstance(group, Group):
            raise TypeError(f"group is {type(group).__name__}: it takes a cufa.parallel.Group")
        parts: dict[str, dict[int, Any]] = {}
        for name, x in given.items():
            parts[name] = {}
            if x is None and name == "dlse":
                continue
            for rank, part in group.parts(name, x).items():
                array = as_array(name, part)
                axes = 3 if name in ("lse", "dlse") else 4
                if array.ndim != axes:
                    raise ValueError(f"{name} of rank {rank} has shape {array.shape}: it takes {axes} axes")
                parts[name][rank] = array if axes == 3 else array.transpose(LAYOUTS[layout])
        heads = placement == "heads" or getattr(placement, "kind", "") == "heads"
        lengths = cls._check(group, parts, heads)
        queries = resolve(placement, [x[0] for x in lengths], "q")
        keys = queries
        if not isinstance(placement, Placement) or [x[1] for x in lengths] != queries.lengths:
            keys = resolve(
                queries.kind if isinstance(placement, Placement) else placement, [x[1] for x in lengths], "k"
            )
        return cls(group, parts, queries, keys, scheme, layout, slopes, sink)

    @staticmethod
    def _check(group: Group, parts: dict[str, dict[int, Any]], by_heads: bool) -> list[tuple[int, int]]:
        """(queries, keys) of every rank. Raises ValueError if the parts do not belong together; in every process, as
        all know the shapes of all."""
        first = parts["q"]
        for name, of_ranks in parts.items():
            like = "k" if name in ("k", "v") else "q"
            for rank, x in of_ranks.items():
                if x.shape[:3] != parts[like][rank].shape[:3]:
                    raise ValueError(
                        f"{name} of rank {rank} has shape {x.shape} but {like} has {parts[like][rank].shape}, in the "
                        "order (batch, heads, tokens, head_dim): they must be equal"
                    )
        sizes = {
            rank: [
                q.shape[2], parts["k"][rank].shape[2], q.shape[0], q.shape[1], parts["k"][rank].shape[1], q.shape[3],
                sum(map(ord, str(q.dtype))), int(is_device_array(q)),
            ]
            for rank, q in first.items()
        }  # fmt: skip
        every = group.gather(sizes)
        for rank, x in enumerate(every):
            if [*x][2 : 3 if by_heads else None] != [*every[0]][2 : 3 if by_heads else None]:
                raise ValueError(
                    f"q and k of rank {rank} have (batch, heads, kv_heads, head_dim) {tuple(x[2:6])}, those of rank 0 "
                    f"{tuple(every[0][2:6])}: all but tokens must be equal, dtype and place too"
                )
        return [(int(x[0]), int(x[1])) for x in every]

    @property
    def _heads(self) -> tuple[int, int]:
        (q, *_), (k, *_) = self.given["q"].values(), self.given["k"].values()
        return q.shape[1], k.shape[1]

    def mask(self, mask: Mask, seqlens: Any) -> Whole:
        """The mask of the whole score matrix."""
        if not mask.known:
            raise ValueError(f"mask={mask} has its numbers on a GPU: several ranks take mask.on_host()")
        seqlen_q, seqlen_k = self.queries.seqlen, self.keys.seqlen
        batch = next(iter(self.given["q"].values())).shape[0]
        misfit = mask.misfit(batch, self._heads[1], seqlen_q, seqlen_k)
        if misfit:
            raise ValueError(f"mask={mask} {misfit}")
        if seqlens is not None:
            mask = _shortened(mask, np.asarray(seqlens), batch, seqlen_q, seqlen_k)
        return Whole.of(mask, seqlen_q, seqlen_k, self.alibi_slopes is not None)

    def schedule(self, whole: Whole, backward: bool) -> Schedule:
        heads, kv_heads = self._heads
        if kv_heads and heads % kv_heads:
            raise ValueError(f"q has {heads} heads and k {kv_heads}: heads must be a multiple of kv_heads")
        return make_schedule(
            self.scheme, whole, self.queries, self.keys, heads, kv_heads, backward, self.sink is not None
        )

    def scores(
        self,
        scale: float | None,
        softcap: float | None,
        algorithm: str,
        precision: str | None,
        device: str | None,
    ) -> Scores:
        Options(softcap=softcap, scale=scale)
        return Scores(scale, softcap, self.alibi_slopes, self.sink, algorithm, precision, device=device)

    def in_layout(self, parts: dict[int, Any]) -> dict[int, Any]:
        return {rank: x.transpose(LAYOUTS[self.layout]) for rank, x in parts.items()}


def _shortened(mask: Mask, seqlens: Any, batch: int, seqlen_q: int, seqlen_k: int) -> Mask:
    """The mask without the padding of sequences."""
    if seqlens.shape != (batch,) or seqlens.dtype.kind not in "iu" or seqlen_q != seqlen_k:
        raise ValueError(
            f"seqlens has shape {seqlens.shape}: it takes (batch,), here ({batch},), with as many queries as keys"
        )
    if not isinstance(mask, Band) or mask.irregular_kind or mask.shift(seqlen_q, seqlen_k):
        raise ValueError(f"seqlens= goes with full, causal and window masks, not with {mask}")
    key = np.arange(seqlen_k)
    lo = np.where(key < seqlens[:, None], seqlens[:, None], 0)
    runs = np.stack([lo, np.full_like(lo, TO_THE_END)])[:, :, None]
    return Columns(mask, Integers(runs), "top-left", f"{mask}, padded")


def _dsink(call: _Call, sink: Any) -> Any:
    """The gradient of the sink: of each head the sum of -exp(sink - lse) (rowsum(dout ∘ out) - dlse) over all rows.
    Every rank adds the shares of all, in the order of ranks."""
    from .group import Move

    group, shares, all_of = call.group, {}, {}
    for rank in group.local:
        with group.on(rank):
            lse = call.given["lse"][rank]
            xp = module_of(lse)
            dout, out = (call.given[name][rank].astype(lse.dtype) for name in ("dout", "out"))
            delta = (dout * out).sum(axis=-1)
            if call.given["dlse"]:
                delta = delta - call.given["dlse"][rank]
            logit = on_device(sink, lse)[:, None]
            weight = xp.where(xp.isfinite(logit) & xp.isfinite(lse), xp.exp(logit - lse), 0)
            shares[rank] = -(weight * delta).sum(axis=(0, 2))
            all_of[rank] = xp.empty((group.size, *shares[rank].shape), lse.dtype)
    like = next(iter(shares.values()))
    if call.queries.kind == "heads":
        return group.returned(shares)
    group.begin()
    moves = [
        Move(
            one,
            other,
            shares.get(one),
            all_of[other][one] if other in all_of else None,
            like.shape,
            like.dtype,
        )
        for one in range(group.size)
        for other in range(group.size)
        if one in shares or other in shares
    ]
    group.finish(group.start(moves))
    group.end()
    found = {}
    for rank, x in all_of.items():
        with group.on(rank):
            found[rank] = x.sum(axis=0)
    return group.returned(found)
