"""The definition of attention over packed sequences: each sequence for itself, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calls import optional_operands
from ..calls.shapes import check_mask, check_rows
from ..problem.checks import check_not_masked
from ..problem.dropout import dropout_of, resolve_dropout
from ..problem.mask_family import Mask
from ..problem.options import resolve_mask
from ..problem.packed_masks import of_sequences
from ..problem.score_function import resolve_score
from ..problem.where import Where
from .dense import Array, attention_reference, attention_reference_backward


def attention_varlen_reference(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike, *, return_lse: bool = False, **options: Any,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The definition of :func:`cufa.flash_attention_varlen`, in float64: :func:`attention_reference` of each sequence.
    q is (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim); ``options`` are causal, window, mask,
    softcap, scale, alibi_slopes, sink, score, bias, dropout and seed. Rows outside all sequences give zeros and lse =
    -inf.

    Returns o in q's shape, and with ``return_lse`` also lse (heads, total_q).
    """
    q, k, v = (_packed(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    o, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[1::-1], -np.inf)
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k, (len(q), len(k)))
    options = _with_mask(options, q.shape[1], k.shape[1], sequences)
    for b, rows, keys in sequences:
        arrays = _as_one(q[rows]), _as_one(k[keys]), _as_one(v[keys])
        found = attention_reference(*arrays, return_lse=True, **_options_of(b, options, arrays))
        o[rows], lse[:, rows] = found[0][0].swapaxes(0, 1), found[1][0]
    return (o, lse) if return_lse else o


def attention_varlen_reference_backward(
    dout: npt.ArrayLike, q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike, *, dlse: npt.ArrayLike | None = None, **options: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of :func:`attention_varlen_reference` with respect to q, k, v and, if given, the sink. ``dout`` is the
    gradient with respect to o, ``dlse`` with respect to the log-sum-exp (heads, total_q)."""
    check_not_masked("dlse", dlse)
    dout, q, k, v = (_packed(name, x) for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v)))
    gradients = [np.zeros(x.shape) for x in (q, k, v)]
    dsink = [np.zeros(q.shape[1])] if options.get("sink") is not None else []
    more: list[Any] = []  # dsink, and gradients of a score function's arrays
    if dlse is not None:
        check_rows("dlse", np.shape(dlse), q.shape[1::-1], "bshd")
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k, (len(q), len(k)))
    options = _with_mask(options, q.shape[1], k.shape[1], sequences)
    for b, rows, keys in sequences:
        arrays = [_as_one(x[part]) for x, part in ((dout, rows), (q, rows), (k, keys), (v, keys))]
        own_dlse = None if dlse is None else np.asarray(dlse)[None, :, rows]
        found = attention_reference_backward(*arrays, dlse=own_dlse, **_options_of(b, options, arrays[1:]))
        for x, part, value in zip(gradients, (rows, keys, keys), found[:3], strict=True):
            x[part] = value[0].swapaxes(0, 1)
        more = [x + y for x, y in zip(more or [0] * len(found[3:]), found[3:], strict=True)]
    return (*gradients, *(more or dsink))


def _packed(name: str, x: npt.ArrayLike) -> npt.NDArray[Any]:
    check_not_masked(name, x)
    if np.ndim(x) != 3:
        raise ValueError(
            f"{name} has shape {np.shape(x)}; packed arrays have three axes (tokens, heads, head_dim)"
        )
    return np.asarray(x)


def _sequences(
    cu_q: npt.ArrayLike, cu_k: npt.ArrayLike, totals: tuple[int, int]
) -> list[tuple[int, slice, slice]]:
    """(index, queries, keys) of each sequence. Raises TypeError or ValueError, as
    :func:`cufa.flash_attention_varlen`."""
    checked = optional_operands.packed(np.asarray(cu_q), np.asarray(cu_k), totals)
    q, k = (x.tolist() for x in checked[:2])
    return [(b, slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(q) - 1)]


def _as_one(x: Any) -> Any:
    """A sequence's array as (1, heads, tokens, head_dim)."""
    return x.swapaxes(0, 1)[None]


@dataclasses.dataclass(frozen=True)
class _OfSequence(Mask):
    """The mask of one sequence, for all its heads."""

    whole: Mask
    sequence: int

    def visible(
        self, rows: Any, keys: Any, seqlen_q: int, seqlen_k: int, batch: int = 0, head: int = 0
    ) -> Any:
        return self.whole.visible(rows, keys, seqlen_q, seqlen_k, self.sequence, head)

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        return self.whole.shift(seqlen_q, seqlen_k)

    def head_of(self, query_head: int, heads: int) -> int:
        return query_head if isinstance(self.whole, Where) else self.whole.head_of(query_head, heads)


def _with_mask(
    options: dict[str, Any], heads: int, kv_heads: int, sequences: Sequence[tuple[int, slice, slice]]
) -> dict[str, Any]:
    """The options, with the mask that the sequences read. Raises ValueError if it does not fit."""
    if options.get("mask") is None:
        return options
    most_q = max((rows.stop - rows.start for _, rows, _ in sequences), default=0)
    most_k = max((keys.stop - keys.start for _, _, keys in sequences), default=0)
    mask, batch = resolve_mask(False, None, options["mask"]), len(sequences)
    mask = of_sequences(mask, batch, heads, kv_heads, (most_q, most_k))
    if not isinstance(mask, Where):
        check_mask(mask, batch, kv_heads, most_q, most_k, heads, packed=True)
    return {**options, "mask": mask}


def _options_of(b: int, options: dict[str, Any], arrays: Sequence[Array]) -> dict[str, Any]:
    """The options of sequence ``b``, whose q and k are ``arrays``."""
    heads, found = arrays[0].shape[1], dict(options)
    if options.get("mask") is not None:
        found["mask"] = _OfSequence(options["mask"], b)
    score = resolve_score(options.get("score"), found.pop("bias", None))
    found["score"] = None if score is None else dataclasses.replace(score, sequence=b)
    random = resolve_dropout(found.pop("dropout", None), found.pop("seed", None))
    found["dropout"] = dropout_of(*random, heads, sequence=b)
    slopes = options.get("alibi_slopes")
    if slopes is not None and np.ndim(slopes) == 2:
        found["alibi_slopes"] = np.asarray(slopes)[b]
    return found
