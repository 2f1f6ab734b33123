"""Decoding over a key/value cache whose positions are spread over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls.decode import flash_decode as decode_here
from ..calls.merge import merge_attention_states
from ..problem.checks import as_array, is_device_array
from ..run.cpu.combine import combine
from .group import Group, Move, module_of
from .run import lse_dtype, on_device


def flash_decode(
    q: Any, k_cache: Any, v_cache: Any, *, group: Group, cache_seqlens: Any = None, interleave: int | None = None,
    softcap: float | None = None, scale: float | None = None, sink: Any = None, return_lse: bool = False,
    device: str | None = None, **options: Any,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_decode` over a cache whose positions are spread over the ranks of a group: every rank attends
    to its own keys, and merges all partial results by their log-sum-exp (Flash-Decoding, Dao et al., 2023).

    Parameters
    ----------
    q : array, (batch, heads, tokens, head_dim), or a list of them
        The same queries on every rank: the last tokens of each sequence.
    k_cache, v_cache : array, (batch, kv_heads, capacity, head_dim), or a list of them
        The local part of the cache, which holds the new tokens already. With ``block_table=`` pages, as for
        :func:`cufa.flash_decode`; a list of tables for a group in one process.
    cache_seqlens : int32 array, (batch,), an int, or a list of arrays, optional
        Tokens of each sequence on all ranks together. Arrays on GPUs are given as one for each rank, and read on the
        GPU. None: all caches are full.
    interleave : int, optional
        Position p is on rank ``p // interleave % P``: sequences of all lengths are even, and a rank's part grows by
        ``interleave`` tokens at a time (take the page size). None: rank r holds the positions after those of rank
        r - 1, as many as its capacity.
    softcap, scale, sink, device, options
        As for :func:`cufa.flash_decode`. Windows, masks, ALiBi and new tokens are not served: a rank appends the
        positions that it holds by itself.

    Returns
    -------
    out, or (out, lse)
        The whole result on every rank, in q's dtype. A rank's partial result is rounded to q's dtype before the merge.

    Raises TypeError or ValueError naming the argument.
    """
    for name in ("window", "mask", "alibi_slopes", "k_new", "v_new"):
        if options.pop(name, None) is not None:
            raise ValueError(
                f"{name}= is not served by cufa.parallel.flash_decode: pass it to cufa.flash_decode"
            )
    parts = {
        name: {rank: as_array(name, x) for rank, x in group.parts(name, given).items()}
        for name, given in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    }
    table = options.pop("block_table", None)
    tables = {} if table is None else group.parts("block_table", table)
    capacities = _capacities(group, parts["k_cache"], tables)
    if interleave is not None and interleave < 1:
        raise ValueError(f"interleave={interleave} must be 1 or more: it takes the tokens of one turn")
    lengths = _lengths(group, cache_seqlens, capacities, next(iter(parts["q"].values())).shape[0])
    outs, lses = {}, {}
    moves = []
    for rank in group.local:
        with group.on(rank):
            x = parts["q"][rank]
            xp = module_of(x)
            outs[rank] = xp.empty((group.size, *x.shape[:3], parts["v_cache"][rank].shape[3]), x.dtype)
            lses[rank] = xp.empty((group.size, *x.shape[:3]), lse_dtype(x))
    mine = {}
    for rank in group.local:
        with group.on(rank):
            options_here = {**options, "softcap": softcap, "scale": scale, "device": device}
            if tables:
                options_here["block_table"] = tables[rank]
            given = parts["q"][rank], parts["k_cache"][rank], parts["v_cache"][rank]
            place = rank, capacities, interleave
            mine[rank] = _partial(*given, lengths[rank], place, options_here)
            outs[rank][rank], lses[rank][rank] = mine[rank]
    for one in range(group.size):
        for other in range(group.size):
            if one != other and (one in group.local or other in group.local):
                for every in (outs, lses):
                    source = every[one][one] if one in every else None
                    target = every[other][one] if other in every else None
                    x = every[group.local[0]][0]
                    moves.append(Move(one, other, source, target, x.shape, x.dtype))
    group.finish(group.start(moves))
    found, of_rows = {}, {}
    for rank in group.local:
        with group.on(rank):
            found[rank], of_rows[rank] = _merged(outs[rank], lses[rank], sink)
    out = group.returned(found)
    return (out, group.returned(of_rows)) if return_lse else out


def _capacities(group: Group, caches: dict[int, Any], tables: dict[int, Any]) -> list[int]:
    """Positions that each rank has room for."""
    here = {r: [x.shape[2] * (tables[r].shape[1] if tables else 1)] for r, x in caches.items()}
    return [int(x[0]) for x in group.gather(here)]


def _lengths(group: Group, given: Any, capacities: list[int], batch: int) -> dict[int, Any]:
    """Tokens of each sequence on all ranks, for each local rank."""
    if given is None:
        given = sum(capacities)
    several = isinstance(given, (list, tuple)) and given and is_device_array(given[0])
    if several or is_device_array(given):
        return dict(group.parts("cache_seqlens", given))
    x = np.broadcast_to(np.asarray(given), (batch,))
    if x.dtype.kind not in "iu" or (x < 0).any() or (x > sum(capacities)).any():
        raise ValueError(
            f"cache_seqlens is {given!r}: it takes integers from 0 to {sum(capacities):,}, the room on all ranks"
        )
    return dict.fromkeys(group.local, x)


def held_by(rank: int, capacities: list[int], interleave: int | None, length: Any) -> Any:
    """How many of the first ``length`` positions a rank holds; ``length`` is an array."""
    xp = module_of(length)
    if interleave is None:
        return xp.clip(length - sum(capacities[:rank]), 0, capacities[rank])
    turn = interleave * len(capacities)
    return length // turn * interleave + xp.clip(length % turn - rank * interleave, 0, interleave)


def _partial(
    q: Any, k: Any, v: Any, length: Any, place: tuple[int, list[int], int | None], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Attention of all query tokens to the keys of one rank, (out, lse). Token i sees the first length - tokens + i + 1
    positions."""
    batch, heads, tokens, head_dim = q.shape
    ends = [held_by(*place, _at_least_0(length - tokens + i + 1)).astype(np.int32) for i in range(tokens)]
    on_host = isinstance(length, np.ndarray)
    if tokens == 1 or not on_host or any((x != ends[-1]).any() for x in ends):
        found = [
            decode_here(q[:, :, i : i + 1], k, v, cache_seqlens=ends[i], return_lse=True, **options)
            for i in range(tokens)
        ]
        if tokens == 1:
            out: tuple[Any, Any] = found[0]
            return out
        xp = module_of(q)
        return xp.concatenate([x[0] for x in found], axis=2), xp.concatenate([x[1] for x in found], axis=2)
    # All tokens see the same keys: as many more heads.
    packed = q.reshape(batch, heads * tokens, 1, head_dim)
    whole, rows = decode_here(packed, k, v, cache_seqlens=ends[0], return_lse=True, **options)
    return whole.reshape(*q.shape[:3], -1), rows.reshape(q.shape[:3])


def _at_least_0(x: Any) -> Any:
    return module_of(x).maximum(x, 0)


def _merged(outs: Any, lses: Any, sink: Any) -> tuple[Any, Any]:
    """Partial results of all ranks, in the order of ranks, and the sink."""
    if sink is not None:
        xp = module_of(outs)
        nothing = xp.zeros_like(outs[:1])
        logit = xp.broadcast_to(on_device(sink, lses)[None, None, :, None], lses[:1].shape)
        outs, lses = xp.concatenate([outs, nothing]), xp.concatenate([lses, logit])
    if not is_device_array(outs):
        out, lse = combine(outs.astype(lses.dtype), lses)
        return out.astype(outs.dtype), lse
    found = outs[0], lses[0]
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        found = merge_attention_states(*found, out, lse)
    return found
