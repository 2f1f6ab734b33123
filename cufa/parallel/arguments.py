"""The arguments of a parallel call, read and checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..calls.shapes import LAYOUTS
from ..problem.checks import as_array, check_choice, is_device_array
from ..problem.columns import TO_THE_END, Columns
from ..problem.integers import Integers
from ..problem.mask import Band, Mask
from .group import Group
from .placement import Placement, resolve
from .schedule import Schedule
from .schemes import make_schedule
from .slices import Whole


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a parallel call, read and checked."""

    group: Group
    given: dict[str, dict[int, Any]]
    """Local parts by name and rank, axes (batch, heads, tokens, head_dim); empty for an argument left out."""
    queries: Placement
    keys: Placement
    heads: tuple[tuple[int, int], ...]
    """Query heads and key/value heads that each rank holds."""
    scheme: str
    layout: str
    alibi_slopes: dict[int, Any]
    sink: dict[int, Any]
    """The array of each local rank; empty for an argument left out."""

    @classmethod
    def read(
        cls, group: Group, given: dict[str, Any], placement: Any, scheme: str, layout: str, slopes: Any,
        sink: Any,
    ) -> Arguments:  # fmt: skip
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
        kind = placement.kind if isinstance(placement, Placement) else placement
        sizes = cls._check(group, parts, kind == "heads")
        seqlens_q, seqlens_k = [x[0] for x in sizes], [x[1] for x in sizes]
        queries = keys = resolve(placement, seqlens_q, "q")
        if seqlens_k != seqlens_q:
            keys = resolve(kind, seqlens_k, "k")
        heads = tuple((x[2], x[3]) for x in sizes)
        by_head = [
            _by_head(group, name, x, heads, kind == "heads")
            for name, x in (("alibi_slopes", slopes), ("sink", sink))
        ]
        return cls(group, parts, queries, keys, heads, scheme, layout, *by_head)

    @staticmethod
    def _check(group: Group, parts: dict[str, dict[int, Any]], by_heads: bool) -> list[tuple[int, ...]]:
        """(queries, keys, heads, kv_heads) of every rank. The ranks exchange their shapes: if the parts do not belong
        together, every process raises ValueError."""
        for name, rank_parts in parts.items():
            like = "k" if name in ("k", "v") else "q"
            for rank, x in rank_parts.items():
                if x.shape[:3] != parts[like][rank].shape[:3]:
                    raise ValueError(
                        f"{name} of rank {rank} has shape {x.shape} but {like} has {parts[like][rank].shape}, in the "
                        "order (batch, heads, tokens, head_dim): they must be equal"
                    )
        sizes = {
            rank: [
                q.shape[2], parts["k"][rank].shape[2], q.shape[1], parts["k"][rank].shape[1], q.shape[0], q.shape[3],
                sum(map(ord, str(q.dtype))), int(is_device_array(q)),
            ]
            for rank, q in parts["q"].items()
        }  # fmt: skip
        every = [tuple(map(int, x)) for x in group.gather(sizes)]
        equal = slice(4, 5) if by_heads else slice(2, None)
        for rank, x in enumerate(every):
            if x[equal] != every[0][equal]:
                raise ValueError(
                    f"q and k of rank {rank} have (heads, kv_heads, batch, head_dim) {x[2:6]}, but rank 0 has "
                    f"{every[0][2:6]}: all axes but tokens, dtype and device must be equal"
                )
        return [x[:4] for x in every]

    def mask(self, mask: Mask, seqlens: Any) -> Whole:
        """The mask of the whole score matrix."""
        seqlen_q, seqlen_k = self.queries.seqlen, self.keys.seqlen
        batch = next(iter(self.given["q"].values())).shape[0]
        for rank in self.group.local:
            if misfit := mask.misfit(batch, self.heads[rank][1], seqlen_q, seqlen_k):
                raise ValueError(f"mask={mask} {misfit}")
        if not mask.known:
            raise ValueError(f"mask={mask} has its numbers on a GPU: several ranks take mask.on_host()")
        if seqlens is not None:
            mask = _shortened(mask, np.asarray(seqlens), batch, seqlen_q, seqlen_k)
        return Whole.of(mask, seqlen_q, seqlen_k, bool(self.alibi_slopes))

    def schedule(self, whole: Whole, backward: bool) -> Schedule:
        return make_schedule(
            self.scheme, whole, self.queries, self.keys, self.heads, backward, bool(self.sink)
        )

    def in_layout(self, parts: dict[int, Any]) -> dict[int, Any]:
        return {rank: x.transpose(LAYOUTS[self.layout]) for rank, x in parts.items()}


def _by_head(
    group: Group, name: str, x: Any, heads: tuple[tuple[int, int], ...], placed: bool
) -> dict[int, Any]:
    """The array of each local rank that has one value for each query head the rank holds. ``placed``: ranks hold
    different heads."""
    if x is None:
        return {}
    several = group.one_process and (placed or isinstance(x, (list, tuple)))
    parts = group.parts(name, x) if several else dict.fromkeys(group.local, x)
    for rank, part in parts.items():
        if np.shape(part)[-1:] != heads[rank][:1]:
            raise ValueError(
                f"{name} of rank {rank} has shape {np.shape(part)}: its last axis takes {heads[rank][0]} values, one "
                "for each query head of the rank's q"
            )
    return parts


def _shortened(mask: Mask, seqlens: Any, batch: int, seqlen_q: int, seqlen_k: int) -> Mask:
    """The mask that also hides the padding after each sequence."""
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
