"""Optional operands: ALiBi slopes, sinks, sequence lengths. They are small, may be host arrays in a call on a GPU, and
have their values checked on the host only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..plan.operation import CACHE, PER_HEAD, PER_HEAD_AND_LENGTHS, SCORE_ARRAYS, SEED
from ..problem.checks import as_array, is_device_array
from ..problem.integers import INT32
from ..problem.lengths import Packed, Padded
from ..problem.problem import Problem
from ..problem.scores import bounded
from . import arrays

_NUMBERS = tuple(x.name for x in PER_HEAD)


def read(given: Mapping[str, Any], q: Any) -> dict[str, Any]:
    """The operands that are not None, as arrays. Raises TypeError or ValueError for a value that is no array, and for a
    device array on another GPU than q (q None: not checked)."""
    found = {}
    for name, x in given.items():
        if x is None:
            continue
        if isinstance(x, (list, tuple)):
            try:
                x = np.asarray(x) if len(x) else np.zeros(0, np.int32)
            except ValueError as error:
                raise TypeError(f"{name} is no array of numbers: {error}") from error
        found[name] = as_array(name, x)
        if q is not None and is_device_array(found[name]):
            arrays.same_place({"q": q, name: found[name]})
    return found


def check(inputs: Mapping[str, Any], problem: Problem) -> tuple[dict[str, Any], Problem]:
    """The inputs as kernels read them, and the problem with lengths, ALiBi and sink filled in."""
    cache_operands = CACHE if problem.operation == "forward" else ()
    optional = {x.name for x in (*PER_HEAD_AND_LENGTHS, *SCORE_ARRAYS, SEED, *cache_operands)}
    found = {name: x for name, x in inputs.items() if x is not None or name not in optional}
    heads = {"alibi_slopes": ((problem.heads,), (problem.batch, problem.heads)), "sink": ((problem.heads,),)}
    for name in _NUMBERS:
        if name in found:
            found[name] = check_numbers(name, found[name], heads[name], problem)
    in_cache = problem.lengths.in_cache  # lengths are checked
    seqlens = {
        name: checked_lengths(f"seqlens_{name}", found[f"seqlens_{name}"], problem.batch, most)
        for name, most in (("q", problem.seqlen_q), ("k", problem.seqlen_k))
        if f"seqlens_{name}" in found and in_cache is None
    }
    found |= {f"seqlens_{name}": x for name, x in seqlens.items()}
    if seqlens:
        problem = dataclasses.replace(problem, lengths=_padded(seqlens))
    if problem.score is not None:
        problem.score.check_indexes(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return found, dataclasses.replace(problem, alibi="alibi_slopes" in found, sink="sink" in found)


def planned(given: Mapping[str, Any], problem: Problem) -> Problem:
    """The problem of a plan. Slopes and sinks may be True in place of an array."""
    marks = {name for name in _NUMBERS if given.get(name) is True}
    there = read({name: x for name, x in given.items() if name not in marks}, None)
    _, problem = check(there, problem)
    return dataclasses.replace(
        problem, alibi=problem.alibi or "alibi_slopes" in marks, sink=problem.sink or "sink" in marks
    )


def check_numbers(name: str, x: Any, shapes: tuple[tuple[int, ...], ...], problem: Problem) -> Any:
    """The array in the dtype of the log-sum-exp; a host array's values are :func:`cufa.problem.scores.bounded`."""
    words = "(heads,)" + " or (batch, heads)" * (len(shapes) > 1)
    check_small(name, x, "float32", "fiu", shapes, words)
    if is_device_array(x):
        if not x.flags.c_contiguous:
            raise ValueError(
                f"{name} has strides {x.strides}: it must be contiguous; use cupy.ascontiguousarray({name})"
            )
        return x
    with np.errstate(all="ignore"):  # too large: infinite, and refused below
        values = np.ascontiguousarray(x, problem.lse_dtype)
    wrong = np.isnan(values) | (np.isposinf(values) if name == "sink" else np.isinf(values))
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        may = "finite, or -inf for no sink" if name == "sink" else "finite"
        raise ValueError(f"{name}{place} is {x[tuple(place)]}: in {problem.lse_dtype} it must be {may}")
    return np.ascontiguousarray(bounded(values), problem.lse_dtype)


def checked_lengths(name: str, x: Any, batch: int, most: int) -> Any:
    x = int32(name, x, (batch,), "(batch,)")
    if isinstance(x, np.ndarray):
        wrong = np.flatnonzero((x < 0) | (x > most))
        if len(wrong):
            b = int(wrong[0])
            raise ValueError(f"{name}[{b}] is {x[b]}: it must be from 0 to {most:,}, the size of the arrays")
    return x


def int32(name: str, x: Any, shape: tuple[int, ...], words: str) -> Any:
    """``x`` as a contiguous int32 array of that shape. Values on a GPU are not read."""
    check_small(name, x, "int32", "iu", (shape,), words)
    if is_device_array(x):
        return x
    wild = np.argwhere((x < INT32.min) | (x > INT32.max))
    if len(wild):
        raise ValueError(f"{name}{wild[0].tolist()} is {x[tuple(wild[0])]}: int32 cannot hold this value")
    return np.ascontiguousarray(x, np.int32)


def check_small(
    name: str, x: Any, dtype: str, kinds: str, shapes: tuple[tuple[int, ...], ...], words: str
) -> None:
    """Raises TypeError or ValueError unless a small operand has a dtype of ``kinds`` (:attr:`numpy.dtype.kind`) and one
    of ``shapes``, whose axes ``words`` names. A device array must also have ``dtype`` and a contiguous last axis."""
    if x.dtype.kind not in kinds and not ("f" in kinds and str(x.dtype) == "bfloat16"):  # bfloat16 has kind V
        raise TypeError(f"{name} is {x.dtype}: it takes {dtype}; convert with {name}.astype({dtype!r})")
    if x.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {x.shape}: it takes {words}, here {allowed}")
    if is_device_array(x):
        if str(x.dtype) != dtype:
            raise TypeError(
                f"{name} is {x.dtype}; on a GPU it must be {dtype}: convert with {name}.astype({dtype!r})"
            )
        arrays.check_last_axis(name, x)
        arrays.check_address(name, x)


def _padded(seqlens: Mapping[str, Any]) -> Padded:
    if not all(isinstance(x, np.ndarray) for x in seqlens.values()):
        return Padded(on_host=False)
    queries, keys = (tuple(seqlens[n].tolist()) if n in seqlens else None for n in "qk")
    return Padded(queries, keys)


def edges_of_padded(given: Mapping[str, Any], problem: Problem) -> tuple[Any, Any]:
    """The lengths of padded sequences on a GPU as cumulative lengths of queries and of keys."""
    import cupy

    found = []
    for name, most in (("seqlens_q", problem.seqlen_q), ("seqlens_k", problem.seqlen_k)):
        x = given.get(name)
        counts = cupy.full(problem.batch, most, np.int32) if x is None else cupy.asarray(x).clip(0, most)
        found.append(cupy.concatenate([cupy.zeros(1, np.int32), counts.cumsum(dtype=np.int32)]))
    return found[0], found[1]


def packed(cu_q: Any, cu_k: Any, totals: tuple[int, int]) -> tuple[Any, Any, Packed]:
    """cu_seqlens of queries and keys as kernels read them, and the lengths of the sequences."""
    cu_q, queries = cumulative("cu_seqlens_q", cu_q, totals[0], "q")
    cu_k, keys = cumulative("cu_seqlens_k", cu_k, totals[1], "k", cu_q.shape)
    known = (None, None) if queries is None or keys is None else (queries, keys)
    return cu_q, cu_k, Packed(*totals, *known)


def cumulative(
    name: str, x: Any, total: int, kind: str, shape: tuple[int, ...] | None = None
) -> tuple[Any, tuple[int, ...] | None]:
    """(cumulative lengths as kernels read them, the sequences' lengths or None on a GPU). Raises ValueError unless host
    values rise from 0 to at most ``total``, the rows of ``kind``."""
    if shape is None and (x.ndim != 1 or len(x) < 1):
        raise ValueError(
            f"{name} has shape {x.shape}: it takes (sequences + 1,), the begin of each sequence and the end"
        )
    x = int32(name, x, shape or x.shape, "(sequences + 1,), as cu_seqlens_q")
    if not isinstance(x, np.ndarray):
        return x, None
    if x[0] != 0:
        raise ValueError(f"{name}[0] is {x[0]}: the first sequence begins at 0")
    falls = np.flatnonzero(np.diff(x) < 0)
    if len(falls):
        n = int(falls[0])
        raise ValueError(
            f"{name}[{n + 1}] is {x[n + 1]}, less than {name}[{n}], {x[n]}: cumulative lengths must not fall "
            "(equal: a sequence without tokens)"
        )
    if x[-1] > total:
        raise ValueError(
            f"{name}[-1] is {x[-1]} but {kind} has {total} rows: the last sequence must end within them"
        )
    return x, tuple(np.diff(x).tolist())


def fill_sink_alone(given: Mapping[str, Any], results: Mapping[str, Any], xp: Any) -> None:
    """Fill the results of a call with a sink and without queries or keys: lse of each row is the sink, and dsink is the
    sum of dlse. ``xp`` is the arrays' module."""
    sink = given["sink"]
    row_values = results.get("lse") if "lse" in results else given.get("dlse")
    if row_values is None:  # no dlse: the gradient of the sink is 0, as it was filled
        return
    row = xp.arange(row_values.shape[-1])
    exists = row >= 0  # an array: CuPy's where() takes no bool
    if given.get("seqlens_q") is not None:
        exists = row < given["seqlens_q"][:, None, None]
    elif given.get("cu_seqlens_q") is not None:
        exists = row < given["cu_seqlens_q"][-1]
    if "lse" in results:
        row_values[...] = xp.where(exists, sink[:, None], -xp.inf)
    else:
        sums = xp.where(exists & xp.isfinite(sink)[:, None], row_values, 0).sum(axis=-1)
        results["dsink"][...] = sums.reshape(-1, len(sink)).sum(axis=0)
