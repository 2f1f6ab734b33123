"""Whole arrays to local parts, and back."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ..calls.shapes import LAYOUTS
from ..problem.checks import as_array, module_of
from .group import Group
from .placement import placed, resolve


def distribute(x: Any, group: Group, placement: Any = "contiguous", layout: str = "bhsd") -> Any:
    """The local parts of a whole array (batch, heads, tokens, head_dim), or (batch, heads, tokens): of this process's
    ranks, on their GPUs, as copies. NumPy arrays give views where tokens are neighbours. Waits for the array's GPU."""
    x = as_array("x", x)
    axis = _axis(x, layout)
    placement = placed(placement, x.shape[axis], group.size)
    parts, xp = {}, module_of(x)
    for rank in group.local:
        with contextlib.nullcontext() if isinstance(x, np.ndarray) else x.device:
            if placement.kind == "heads":
                heads_axis = _heads_axis(x, layout)
                n = x.shape[heads_axis]
                cut = slice(rank * n // group.size, (rank + 1) * n // group.size)
                part = x[(slice(None),) * heads_axis + (cut,)]
            else:
                runs = [x[(slice(None),) * axis + (slice(*r),)] for r in placement.ranges[rank]]
                empty = x[(slice(None),) * axis + (slice(0, 0),)]
                part = xp.concatenate(runs, axis=axis) if len(runs) > 1 else (runs or [empty])[0]
            part = _settled(part)
        with group.on(rank):
            parts[rank] = part if isinstance(part, np.ndarray) else xp.array(part)
    return group.returned(parts)


def collect(parts: Any, group: Group, placement: Any = "contiguous", layout: str = "bhsd") -> Any:
    """The whole array, joined from local parts on the first part's GPU, for groups in one process. Waits for GPUs."""
    if not group.one_process:
        raise ValueError(
            "collect takes a group whose ranks are all in this process: gather parts with MPI or NCCL"
        )
    given = list(group.parts("parts", parts).values())
    axis = _axis(given[0], layout)
    placement = resolve(placement, [x.shape[axis] for x in given], "parts")
    with group.on(0):
        xp = module_of(given[0])
        here = [xp.asarray(_settled(x)) for x in given]
        if placement.kind == "heads":
            return xp.concatenate(here, axis=_heads_axis(given[0], layout))
        shape = list(here[0].shape)
        shape[axis] = placement.seqlen
        whole = xp.empty(tuple(shape), here[0].dtype)
        for rank, x in enumerate(here):
            for s in placement.segments(rank):
                at, of = slice(s.token, s.end), slice(s.row, s.row + s.length)
                whole[(slice(None),) * axis + (at,)] = x[(slice(None),) * axis + (of,)]
        return whole


def _settled(x: Any) -> Any:
    """An array that another GPU may copy: contiguous and computed. (A GPU's stream does not wait for another GPU's.)"""
    if isinstance(x, np.ndarray):
        return x
    with x.device:
        settled = module_of(x).ascontiguousarray(x)
        x.device.synchronize()
    return settled


def _heads_axis(x: Any, layout: str) -> int:
    return 2 if layout == "bshd" and x.ndim == 4 else 1


def _axis(x: Any, layout: str) -> int:
    """The axis of tokens."""
    if layout not in LAYOUTS or x.ndim not in (3, 4):
        raise ValueError(f"layout={layout!r} with an array of shape {x.shape}: it takes 'bhsd' or 'bshd'")
    return 1 if layout == "bshd" and x.ndim == 4 else 2
