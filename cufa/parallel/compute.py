"""One rank's share of a step: calls of the kernels, and partial results joined in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..calls.backward import flash_attention_backward
from ..calls.forward import flash_attention
from ..calls.merge import merge_attention_states
from ..calls.running import attend
from ..calls.shares import gradient_shares
from ..problem.checks import module_of
from ..problem.options import Options
from .placement import Range
from .schedule import Call


@dataclasses.dataclass(frozen=True)
class Scores:
    """Keywords of a parallel call: how scores are computed, and which kernel runs."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    """Of a parallel call: the array of each local rank. :meth:`of_heads` takes some heads of one rank's array."""
    sink: Any = None
    algorithm: str = "auto"
    precision: str | None = None
    deterministic: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        Options(softcap=self.softcap, scale=self.scale)  # refuses values that no kernel takes

    def of_heads(self, rank: int, heads: Range) -> Scores:
        """The keywords for some query heads of a rank."""
        slopes, sink = (x[rank][..., slice(*heads)] if x else None for x in (self.alibi_slopes, self.sink))
        return dataclasses.replace(self, alibi_slopes=slopes, sink=sink)

    def keywords(self, *more: str) -> dict[str, Any]:
        names = ("scale", "softcap", "alibi_slopes", "algorithm", "precision", "device", *more)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def rows_of(x: Any, rows: Range) -> Any:
    return x[:, :, slice(*rows)]


def forward_call(
    call: Call, q: Any, k: Any, v: Any, out: Any, state: tuple[Any, Any], scores: Scores
) -> None:
    """Run ``call`` on a work's queries and a step's keys. ``state``: (running result, lse)."""
    running, lse = state
    q, out, lse = (rows_of(x, call.rows) for x in (q, out, lse))
    k, v = rows_of(k, call.keys), rows_of(v, call.keys)
    if call.plain:
        into = {"lse": lse} if lse.flags.c_contiguous else {}
        _, new_lse = flash_attention(
            q, k, v, mask=call.mask, return_lse=True, out=out, **into, **scores.keywords("sink")
        )
        if not into:
            lse[...] = new_lse
        return
    begin = call.rows[0]
    rows = call.fresh[0] - begin, call.fresh[1] - begin, call.done[0] - begin, call.done[1] - begin
    options = Options(call.mask, scores.softcap, scores.scale, scores.precision, "bhsd", scores.algorithm)
    attend_or_merge(
        q, k, v, out, rows_of(running, call.rows), lse, rows, options,
        alibi_slopes=scores.alibi_slopes, device=scores.device,
    )  # fmt: skip


_unserved: set[Any] = set()
"""Kinds of calls for which no kernel takes a running result."""


def attend_or_merge(
    q: Any, k: Any, v: Any, out: Any, running: Any, running_lse: Any, rows: tuple[int, int, int, int], options: Options,
    *, alibi_slopes: Any, device: str | None,
) -> None:  # fmt: skip
    """:func:`cufa.calls.running.attend`; where no kernel takes running results, a plain call and a pass that merges."""
    kind = (str(q.dtype), q.shape[-1], type(options.mask), options.algorithm, options.precision)
    if kind not in _unserved:
        try:
            attend(
                q, k, v, out, running, running_lse, rows, options, alibi_slopes=alibi_slopes, device=device
            )
            return
        except ValueError as error:
            if "running" not in str(error):
                raise
            _unserved.add(kind)
    plain: Any = flash_attention
    found, lse = plain(
        q, k, v, mask=options.mask, softcap=options.softcap, scale=options.scale, alibi_slopes=alibi_slopes,
        algorithm=options.algorithm, precision=options.precision, return_lse=True,
    )  # fmt: skip
    fresh, fresh_end, done, done_end = rows
    found = found.astype(np.float32)
    end = lse.shape[-1]
    for begin, stop, is_fresh in ((0, fresh, False), (fresh, fresh_end, True), (fresh_end, end, False)):
        if begin == stop:
            continue
        before, before_lse, new, new_lse = (
            rows_of(x, (begin, stop)) for x in (running, running_lse, found, lse)
        )
        if not is_fresh:
            new, new_lse = merge_attention_states(before, before_lse, new, new_lse)
        before[...], before_lse[...] = new, new_lse
    rows_of(out, (done, done_end))[...] = rows_of(running, (done, done_end))


def backward_call(
    call: Call, query_arrays: tuple[Any, ...], k: Any, v: Any, scores: Scores, into: Sequence[Any],
    float32: tuple[str, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """dq of the call's rows, dk and dv of its keys. ``query_arrays``: dout, q, out, lse and dlse of the work. ``into``:
    arrays to write dq, dk and dv to, or None for new arrays. ``float32`` names the gradients in float32."""
    dout, q, out, lse, dlse = (None if x is None else rows_of(x, call.rows) for x in query_arrays)
    lse, dlse = (None if x is None else module_of(x).ascontiguousarray(x) for x in (lse, dlse))
    k, v = rows_of(k, call.keys), rows_of(v, call.keys)
    dq, dk, dv = into
    gradients: tuple[Any, ...]
    if float32:
        options = Options(
            call.mask, scores.softcap, scores.scale, scores.precision, "bhsd", scores.algorithm,
            deterministic=scores.deterministic,
        )  # fmt: skip
        given = {
            "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv,
            "alibi_slopes": scores.alibi_slopes,
        }  # fmt: skip
        gradients = gradient_shares(given, options, float32, scores.device)
        return gradients
    gradients = flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse=dlse,
        mask=call.mask,
        dq=dq,
        dk=dk,
        dv=dv,
        **scores.keywords("deterministic"),
    )
    return gradients
