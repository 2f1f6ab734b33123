"""Masks that a function defines: made by :func:`cufa.masks.where`, and of arrays of booleans that broadcast."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .bits import Bits, packed
from .checks import is_device_array
from .columns import Columns
from .expression import BOOL, INT, ArrayForm, Expression, Trace
from .integers import Integers
from .mask import Band
from .mask_family import Edges, Mask, shift_of
from .score_change import ScoreChange, changed
from .score_function import forms_of, named_arrays
from .tile_classes import Bools, Ints
from .tracing import takes_delta, trace

_INPUTS = dict.fromkeys("bhij", INT)
_SCORES_AT_ONCE = 1 << 20

BitsOnGpu = Callable[..., Any]
"""(mask, (batch, heads, seqlen_q, seqlen_k), words or None) to its words by row on the current GPU. For packed
sequences also: cu_seqlens of queries and keys, and the number of sequences in one matrix (0: each has a matrix)."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Where(Mask):
    """Query i of query head h in sequence b sees key j where ``function`` is True. A call gets the mask's
    :class:`~cufa.problem.bits.Bits` of its lengths, made once where its arrays are (:meth:`bound`)."""

    function: Callable[..., Any]
    arrays: Mapping[str, Any]
    change: ScoreChange
    """The score that the function stands for: 0 where the query sees the key, else -inf."""
    b: int = 0
    h: int = 0
    made: dict[Any, tuple[Bits, Any]] = dataclasses.field(default_factory=dict)
    """Bits and the function that made them, by GPU (None: the host) and sizes."""

    @property
    def takes_booleans(self) -> bool:
        """The mask of an array of booleans."""
        return self.function is _element

    def bound(
        self, batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int,
        on_gpu: tuple[int, BitsOnGpu] | None = None,
    ) -> Bits:  # fmt: skip
        """The mask of a call of these sizes; ``on_gpu``: the number of its GPU, and the function that makes bits there.
        Raises ValueError."""
        reads = self.change.expression.inputs
        if self.takes_booleans:
            shape = self.arrays["mask"].shape
            sizes = (batch,), (kv_heads, heads), (seqlen_q,), (seqlen_k,)
            if not all(n == 1 or n in fits for n, fits in zip(shape, sizes, strict=True)):
                raise ValueError(
                    f"mask has shape {shape}: each axis has size 1, or the size in (batch, heads, seqlen_q, seqlen_k), "
                    f"here {(batch, heads, seqlen_q, seqlen_k)}; heads may be those of k"
                )
            mask_counts = shape[:2]
        else:
            mask_counts = batch if "b" in reads else 1, heads if "h" in reads else 1
        self.change.check_indexes(batch, heads, seqlen_q, seqlen_k)
        device, make = on_gpu or (None, type(self).words)
        if device is None:
            self._check_on_host()
        key = device, *mask_counts, seqlen_q, seqlen_k
        if key not in self.made:
            self.made[key] = Bits(Integers(make(self, key[1:])), seqlen_k), make
        return self.made[key][0]

    def refresh(self) -> None:
        """Makes the bits again, after values of the mask's arrays have changed. Bits on a GPU keep their memory, so
        that captured graphs read the new bits."""
        for key, (bits, make) in [*self.made.items()]:
            if key[0] is None:
                del self.made[key]
                continue
            make(self, key[1:], bits.by_row.array)
            if "by_key" in bits.__dict__:
                Bits.transposed_on_gpu(bits.by_row.array, bits.keys, bits.by_key.array)

    def words(self, sizes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """The words of :class:`~cufa.problem.bits.Bits`, by NumPy."""
        batch, heads, seqlen_q, seqlen_k = sizes
        step = max(_SCORES_AT_ONCE // max(seqlen_k, 1), 1)
        keys = np.arange(seqlen_k)
        found = [
            packed(self.visible(np.arange(first, min(first + step, seqlen_q)), keys, seqlen_q, seqlen_k, b, h))
            for b in range(batch) for h in range(heads) for first in range(0, seqlen_q, step)
        ]  # fmt: skip
        width = -(-seqlen_k // 32)
        return np.concatenate([np.zeros((0, width), np.int32), *found]).reshape(batch, heads, seqlen_q, width)

    def packed(
        self, sizes: tuple[int, ...], edges: tuple[Any, Any], totals: tuple[int, int],
        on_gpu: tuple[int, BitsOnGpu] | None = None,
    ) -> Bits:  # fmt: skip
        """The mask of packed sequences as one matrix of all tokens, ``totals``. ``sizes``: (sequences, heads, most
        queries, most keys of a sequence); ``edges``: cu_seqlens of queries and keys; ``on_gpu`` as for :meth:`bound`.
        Every call makes the bits anew, because edges on a GPU may change."""
        self.change.check_indexes(*sizes)
        matrix = 1, sizes[1] if "h" in self.change.expression.inputs else 1, *totals
        if on_gpu is not None:
            return Bits(Integers(on_gpu[1](self, matrix, None, edges, sizes[0])), totals[1])
        self._check_on_host()
        words = np.zeros((*matrix[:3], -(-totals[1] // 32)), np.int32)
        for b, h in np.ndindex(sizes[0], matrix[1]):
            (row, end_row), (key, end_key) = (map(int, x[b : b + 2]) for x in edges)
            seen = np.zeros((end_row - row, totals[1]), bool)
            seen[:, key:end_key] = self.dense(end_row - row, end_key - key, b, h)
            words[0, h, row:end_row] = packed(seen)
        return Bits(Integers(words), totals[1])

    def by_sequence(
        self, lengths: tuple[tuple[int, int], ...], sizes: tuple[int, ...], edges: tuple[Any, Any],
        on_gpu: tuple[int, BitsOnGpu] | None = None,
    ) -> Bits:  # fmt: skip
        """As :meth:`packed`, with a matrix for each sequence, of the most queries and keys of ``sizes``. ``lengths``:
        (queries, keys) of each sequence."""
        self.change.check_indexes(*sizes)
        batch, heads, *most = sizes
        matrix = batch, heads if "h" in self.change.expression.inputs else 1, *most
        if on_gpu is not None:
            return Bits(Integers(on_gpu[1](self, matrix, None, edges)), most[1], own_diagonal=True)
        self._check_on_host()
        seen = np.zeros(matrix, bool)
        for b, h in np.ndindex(matrix[:2]):
            rows, keys = lengths[b]
            seen[b, h, :rows, :keys] = self.dense(rows, keys, b, h)
        return dataclasses.replace(Bits.of(seen), own_diagonal=True)

    def _check_on_host(self) -> None:
        if any(map(is_device_array, self.arrays.values())):
            raise ValueError(
                f"mask, {self}, reads arrays on a GPU, but the call is computed on the CPU: pass x.get()"
            )

    # --- A mask of one head -------------------------------------------------------------------------------

    def at(self, batch: int, head: int) -> Where:
        return dataclasses.replace(self, b=batch, h=head, made={})

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        return None, None

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        inputs = {"b": self.b, "h": self.h, "i": row, "j": key, "delta": seqlen_k - seqlen_q}
        found: Bools = changed(self.change, inputs, [*self.arrays.values()], np.float32)[0] == 0
        return found

    def for_kernels(self, seqlen_q: int, seqlen_k: int) -> Bits:
        """The bits of one head. A call reads the bits of all heads (:meth:`bound`)."""
        return Bits(Integers(self.words((1, 1, seqlen_q, seqlen_k))), seqlen_k)

    @property
    def irregular_kind(self) -> str:
        return "bits"

    def misfit(
        self, batch: int, kv_heads: int, seqlen_q: int | None = None, seqlen_k: int | None = None,
        packed: bool = False,
    ) -> str | None:  # fmt: skip
        """A call asks where it takes no function."""
        if self.takes_booleans:
            return "are not taken by caches, e4m3 and calls on several GPUs: use cufa.masks"
        return (
            "is a function, which caches, e4m3 and calls on several GPUs do not take: use a builder of cufa.masks; or "
            "for a cache without pages call flash_attention without cache_seqlens, and let the function test j < n[b], "
            "where n are the keys of each sequence"
        )

    def as_json(self) -> dict[str, Any]:
        """Raises ValueError: its bits (:meth:`bound`) have a form in JSON."""
        raise ValueError(f"{self}: a function has no form in JSON; the bits that bound() returns have one")

    @property
    def known(self) -> bool:
        return not any(map(is_device_array, self.arrays.values()))

    def __str__(self) -> str:
        if self.takes_booleans:
            return "booleans of {} × {} × {} × {}".format(*self.arrays["mask"].shape)
        e = self.change.expression
        op, _, *args = e.code[e.results[0]]
        text = e.text(args[0]) if op == "where" else "everything" if args[0] == 0 else "nothing"
        return f"where {text if len(text) <= 100 else f'{text[:97]}…'}"


def where(function: Callable[..., Any], arrays: Mapping[str, Any]) -> Where:
    """See :func:`cufa.masks.where`."""
    found = named_arrays(arrays, "a mask's function")
    expression = (_traced_booleans if function is _element else _traced)(function, forms_of(found))
    return Where(function, found, ScoreChange(expression, tuple(tuple(x.shape) for x in found.values())))


def where_booleans(seen: Any) -> Where:
    """The mask of an array (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), with heads of q or of k."""
    return where(_element, {"mask": seen})


def _element(b: Any, h: Any, i: Any, j: Any, mask: Any) -> Any:
    return mask[b, h, i, j]


def _traced(function: Callable[..., Any], forms: tuple[ArrayForm, ...]) -> Expression:
    e = trace(function, "the mask's function", _INPUTS, forms, BOOL)
    t = Trace("the mask's function", forms, e.code)
    score = t.where(e.results[0], t.const(0.0), t.const(-np.inf))
    return Expression(tuple(t.code), forms, (score,)).pruned()


_traced_booleans = functools.cache(_traced)


# --- Operators --------------------------------------------------------------------------------------------


def combined_where(operation: str, parts: Sequence[Mask]) -> Where | None:
    """``&``, ``|`` or ``~`` of masks as a function. None: a part has no such form."""
    functions, arrays = [], dict[str, Any]()
    for n, part in enumerate(parts):
        found = _as_function(part)
        if found is None:
            return None
        function, own = found
        functions.append((function, {name: f"{name}_{n}" for name in own}))
        arrays |= {f"{name}_{n}": x for name, x in own.items()}

    def all_of(b: Any, h: Any, i: Any, j: Any, delta: Any, **given: Any) -> Any:
        seen = [f(b, h, i, j, delta, {x: given[y] for x, y in names.items()}) for f, names in functions]
        if operation == "not":
            return ~seen[0]
        return functools.reduce(operator.and_ if operation == "and" else operator.or_, seen)

    return where(all_of, arrays)


_Function = Callable[..., Any]  # (b, h, i, j, delta, arrays by name)


def _as_function(mask: Mask) -> tuple[_Function, Mapping[str, Any]] | None:
    if isinstance(mask, Where):
        more = takes_delta(mask.function)
        return (
            lambda b, h, i, j, delta, x: mask.function(b, h, i, j, **x, **({"delta": delta} if more else {})),
            mask.arrays,
        )
    if isinstance(mask, Band):
        exempt = {name: getattr(mask, name) for name in ("prefix", "keep", "global_tokens")}
        return functools.partial(_in_band, mask), {
            name: n.array for name, n in exempt.items() if isinstance(n, Integers)
        }
    if mask.reads_lengths and (found := combined_where(mask.operation, mask.parts)):  # type: ignore[attr-defined]
        return _as_function(found)
    if isinstance(mask, Columns) and not mask.band.irregular_kind and mask.intervals.shape[2] == 1:
        return functools.partial(_in_columns, mask), {"runs": mask.intervals.array}
    return None


def _in_band(band: Band, b: Any, h: Any, i: Any, j: Any, delta: Any, x: Mapping[str, Any]) -> Any:
    own = i + shift_of(band.diagonal, 0, 1) * delta if isinstance(band.diagonal, str) else i + band.diagonal
    prefix, keep, exempt = (
        x[name][b] if name in x else getattr(band, name) for name in ("prefix", "keep", "global_tokens")
    )
    seen = j >= 0
    if band.left is not None:
        seen = seen & ((j >= own - band.left) | (j < keep))
    if band.right is not None:
        seen = seen & (j <= own + band.right)
    if not band.irregular_kind:
        return seen
    return seen | (j < prefix) | ((own < exempt) & (exempt > 0))


def _in_columns(mask: Columns, b: Any, h: Any, i: Any, j: Any, delta: Any, x: Mapping[str, Any]) -> Any:
    row = i + shift_of(mask.rows, 0, 1) * delta if isinstance(mask.rows, str) else i + mask.rows
    seen, runs = _in_band(mask.band, b, h, i, j, delta, {}), x["runs"]
    for n in range(0, 2 * mask.num_intervals, 2):
        seen = seen & ~((runs[n, b, 0, j] <= row) & (row < runs[n + 1, b, 0, j]))
    return seen
