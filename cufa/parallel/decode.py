"""Decoding over a key/value cache whose positions are spread over ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..calls.decode import flash_decode as decode_here
from ..problem.checks import as_array, is_device_array, module_of
from ..run.cpu.combine import combine
from .group import Group, empty, exchange
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
        Tokens of each sequence on all ranks together. Arrays on GPUs: one for each rank, which reads it on its GPU.
        None: all caches are full.
    interleave : int, optional
        Position p is on rank ``p // interleave % P``: ranks share sequences of any length evenly, and a part grows by
        ``interleave`` tokens at a time (take the page size). None: rank r holds the positions after those of rank
        r - 1, as many as its capacity.
    softcap, scale, sink, device, options
        As for :func:`cufa.flash_decode`. Windows, masks, ALiBi and new tokens are not served: the caller appends new
        tokens to the parts that hold their positions.

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
        raise ValueError(
            f"interleave={interleave} must be 1 or more: the number of neighbouring tokens on a rank"
        )
    first = next(iter(parts["q"].values()))
    lengths = _lengths(group, cache_seqlens, capacities, first.shape[0])
    v_dim = next(iter(parts["v_cache"].values())).shape[3]
    packs = {rank: _Pack(group, rank, parts["q"][rank], v_dim) for rank in group.local}
    for rank in group.local:
        with group.on(rank):
            options_here = {**options, "softcap": softcap, "scale": scale, "device": device}
            if tables:
                options_here["block_table"] = tables[rank]
            given = parts["q"][rank], parts["k_cache"][rank], parts["v_cache"][rank]
            place = rank, capacities, interleave
            _partial(*given, lengths[rank], place, options_here, *packs[rank].of(rank))
    exchange(group, {rank: pack.bytes for rank, pack in packs.items()})
    outs, lses = {}, {}
    for rank, pack in packs.items():
        with group.on(rank):
            outs[rank], lses[rank] = pack.merged(sink)
    out = group.returned(outs)
    return (out, group.returned(lses)) if return_lse else out


class _Pack:
    """The partial results of all ranks in one rank's memory: out and lse of a rank lie side by side."""

    def __init__(self, group: Group, rank: int, q: Any, v_dim: int) -> None:
        self._shape, self._dtype, self._lse_dtype = (*q.shape[:3], v_dim), q.dtype, np.dtype(lse_dtype(q))
        self._split = -(-math.prod(self._shape) * q.dtype.itemsize // 16) * 16
        rows = math.prod(q.shape[:3])
        width = -(-(self._split + rows * self._lse_dtype.itemsize) // 16) * 16
        self._rows, self.bytes = rows, empty(group, rank, (group.size, width), q, np.dtype(np.uint8))

    def of(self, rank: int) -> tuple[Any, Any]:
        """(out, lse) of a rank."""
        out, lse = self._all(self.bytes[rank : rank + 1])
        return out.reshape(self._shape), lse.reshape(self._shape[:3])

    def _all(self, x: Any) -> tuple[Any, Any]:
        """Views of bytes: out (ranks, elements) and lse (ranks, rows)."""
        end = math.prod(self._shape) * self._dtype.itemsize
        lse_end = self._split + self._rows * self._lse_dtype.itemsize
        return x[:, :end].view(self._dtype), x[:, self._split : lse_end].view(self._lse_dtype)

    def merged(self, sink: Any) -> tuple[Any, Any]:
        """(out, lse): the partial results merged in the order of ranks, then the sink."""
        outs, lses = self._all(self.bytes)
        xp, shape = module_of(outs), self._shape
        if sink is not None:
            logit = xp.broadcast_to(on_device(sink, lses)[None, :, None], shape[:3])
            lses = xp.concatenate([lses, logit.reshape(1, -1)])
        if xp is np:
            parts = np.zeros((len(lses), *shape), self._lse_dtype)
            parts[: len(outs)] = outs.reshape(-1, *shape)
            out, lse = combine(parts, lses.reshape(-1, *shape[:3]))
            return out.astype(self._dtype), lse
        out, lse = xp.empty(outs.shape[1:], self._dtype), xp.empty(shape[:3], self._lse_dtype)
        _merger()(outs, lses, len(outs), len(lses), shape[3], lse, out)
        return out.reshape(shape), lse


@functools.cache
def _merger() -> Any:
    """A kernel that merges all ranks' partial results. If ``lses`` has one row more than ``outs``, it is the sink's."""
    import cupy

    return cupy.ElementwiseKernel(
        "raw T outs, raw L lses, int32 ranks, int32 weights, int32 width, raw L lse", "T out",
        """
        const ptrdiff_t row = i / width;
        L m = __int_as_float(0xff800000);
        for (int r = 0; r < weights; r++) {
          const ptrdiff_t at[] = {r, row};
          m = max(m, lses[at]);
        }
        const L shift = isinf(m) ? L(0) : m;
        L total = 0, sum = 0;
        for (int r = 0; r < weights; r++) {
          const ptrdiff_t at[] = {r, row}, of[] = {r, i};
          const L weight = exp(lses[at] - shift);
          total += weight;
          if (r < ranks && weight != 0) sum += weight * L(float(outs[of]));
        }
        out = T(float(total == 0 ? L(0) : sum / total));
        if (i % width == 0) const_cast<L&>(lse[row]) = shift + log(total);
        """,
        "cufa_merge_ranks",
    )  # fmt: skip


def _capacities(group: Group, caches: dict[int, Any], tables: dict[int, Any]) -> list[int]:
    """Positions that each rank has room for."""
    here = {r: [x.shape[2] * (tables[r].shape[1] if tables else 1)] for r, x in caches.items()}
    return [int(x[0]) for x in group.gather(here)]


def _lengths(group: Group, given: Any, capacities: list[int], batch: int) -> dict[int, Any]:
    """For each local rank: the tokens of each sequence, on all ranks together."""
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
    """How many of the first ``length`` positions a rank holds, int32. ``length``: an array; negative lengths: 0."""
    turn, before = (interleave or 0) * len(capacities), sum(capacities[:rank])
    if is_device_array(length):
        if interleave is None and before == 0 and length.dtype == np.int32:
            return length  # the kernel clamps a length to 0 and to the capacity
        return _holder()(
            length, before, capacities[rank], interleave or 0, max(turn, 1), rank * (interleave or 0)
        )
    length = np.maximum(length, 0)
    if interleave is None:
        found = np.clip(length - before, 0, capacities[rank])
    else:
        found = length // turn * interleave + np.clip(length % turn - rank * interleave, 0, interleave)
    return found.astype(np.int32)


@functools.cache
def _holder() -> Any:
    """:func:`held_by` as a kernel."""
    import cupy

    return cupy.ElementwiseKernel(
        "T length, int64 before, int64 capacity, int64 interleave, int64 turn, int64 first", "int32 held",
        """
        const long long n = max((long long)length, 0ll);
        held = interleave ? n / turn * interleave + min(max(n % turn - first, 0ll), interleave)
                          : min(max(n - before, 0ll), capacity);
        """,
        "cufa_held_by_rank",
    )  # fmt: skip


def _partial(
    q: Any, k: Any, v: Any, length: Any, place: tuple[int, list[int], int | None], options: dict[str, Any], out: Any,
    lse: Any,
) -> None:  # fmt: skip
    """Attention of all query tokens to the keys of one rank, into out and lse. Token i sees the first length - tokens +
    i + 1 positions."""
    batch, heads, tokens, head_dim = q.shape
    ends = [held_by(*place, length - (tokens - i - 1) if tokens > i + 1 else length) for i in range(tokens)]
    rank, capacities, _ = place
    on_host = isinstance(length, np.ndarray)
    same = on_host and all((x == ends[-1]).all() for x in ends)
    full = same and (ends[0] == capacities[rank]).all() and "block_table" not in options
    if same and tokens > 1:  # all tokens see the same keys: each becomes a head
        packed, seqlens = (
            q.reshape(batch, heads * tokens, 1, head_dim),
            None if full else _uploaded(ends[0], q),
        )
        found, rows = decode_here(packed, k, v, cache_seqlens=seqlens, return_lse=True, **options)
        out[...], lse[...] = found.reshape(out.shape), rows.reshape(lse.shape)
        return
    for i in range(tokens):
        one = slice(i, i + 1)
        seqlens = None if full else _uploaded(ends[i], q) if on_host else ends[i]
        _, lse[:, :, one] = decode_here(
            q[:, :, one], k, v, cache_seqlens=seqlens, return_lse=True, out=out[:, :, one], **options
        )


def _uploaded(lengths: Any, q: Any) -> Any:
    """Lengths on q's device."""
    return _device_copy(lengths.tobytes(), q.data.device_id) if is_device_array(q) else lengths


@functools.lru_cache(256)
def _device_copy(lengths: bytes, device: int) -> Any:
    """Cached: a decode call with the same array is not checked and planned again. ``device`` is the current GPU."""
    import cupy

    return cupy.asarray(np.frombuffer(lengths, np.int32))
