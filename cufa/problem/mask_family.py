"""Which scores exist: the one definition of every mask.

A mask says for each query row which keys it sees. :meth:`Mask.visible` is the definition, in NumPy; reference,
CPU path, benchmark checks, dashboard and property tests use it. :meth:`Mask.key_tiles` and its transpose
:meth:`Mask.query_tiles` say which tiles of the score matrix are visited and which of them need no mask; the
device side of that rule is ``cuda_src/shared/mask.cuh``.

Kernels read three families. A :class:`~cufa.problem.mask.Band` surrounds a diagonal, and may have exempt tokens.
:class:`~cufa.problem.columns.Columns` are a band in which each key is hidden from one or two runs of rows.
:class:`~cufa.problem.bits.Bits` have one bit per score. Other families become one of these (:meth:`Mask.for_kernels`).
If a mask differs between sequences or heads, :meth:`Mask.at` is the mask of one.

Masks are hashable and printable and survive a round trip through JSON. Columns, bits, and bands made from a matrix fit
calls of one length; other masks fit any length. Users make masks with :mod:`cufa.masks`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from .integers import Integers
from .tile_classes import Bools, Ints, TileLists, Tiles, classes_of

P = ParamSpec("P")
MaskT = TypeVar("MaskT", bound="Mask")

Edges = tuple[int | None, int | None]

DIAGONALS = ("bottom-right", "top-left")

#: Most cells of a matrix of tiles in one NumPy expression.
_CELLS = 1 << 20


class Mask:
    """Base of all masks. A family defines :meth:`for_kernels`; one that kernels read defines ``_visible``, and
    consistently with it :meth:`rectangles` and :meth:`visible_per_key`."""

    families: ClassVar[dict[str, type[Mask]]] = {}

    @functools.cached_property
    def block_orders(self) -> dict[tuple[int, ...], Integers | None]:
        """Query blocks from the longest to the shortest, by block_q, block_kv and both lengths. Kernels read them
        (:attr:`cufa.plan.planner.Plan.block_order`), so they live as long as the mask."""
        return {}

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            Mask.families[cls.__name__.lower()] = cls

    # --- The definition -----------------------------------------------------------------------------------

    def visible(
        self, rows: npt.ArrayLike, keys: npt.ArrayLike, seqlen_q: int, seqlen_k: int, batch: int = 0,
        head: int = 0,
    ) -> Bools:  # fmt: skip
        """Which of ``keys`` each of ``rows`` sees, bool (rows, keys), in the score matrix (seqlen_q, seqlen_k) of
        sequence ``batch`` and key/value head ``head``. False for rows and keys outside of the matrix."""
        row, key = np.asarray(rows, np.int64)[:, None], np.asarray(keys, np.int64)[None, :]
        exists = (row >= 0) & (row < seqlen_q) & (key >= 0) & (key < seqlen_k)
        seen: Bools = exists & self.at(batch, head)._visible(row, key, seqlen_q, seqlen_k)
        return seen

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        """:meth:`visible` of a mask that all sequences and heads share: ``row`` (rows, 1), ``key`` (1, keys). Any
        value for rows and keys outside of the matrix."""
        return self._read_by_kernels("_visible", seqlen_q, seqlen_k)._visible(row, key, seqlen_q, seqlen_k)

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """δ: the position of the first query among the keys. Masks and ALiBi measure distances from key i + δ."""
        return seqlen_k - seqlen_q

    def dense(self, seqlen_q: int, seqlen_k: int, batch: int = 0, head: int = 0) -> Bools:
        """The boolean matrix, (seqlen_q, seqlen_k): True where a query sees a key. Raises TypeError or ValueError for
        invalid lengths."""
        from .checks import check_count

        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        return self.visible(np.arange(seqlen_q), np.arange(seqlen_k), seqlen_q, seqlen_k, batch, head)

    # --- Which matrices there are -------------------------------------------------------------------------

    @property
    def matrix(self) -> tuple[int, int] | None:
        """(seqlen_q, seqlen_k) of the only calls that the mask fits; None: it fits any. Sequences may be shorter."""
        return None

    @property
    def spread(self) -> tuple[int, int]:
        """(sequences, heads) with separate masks; 1 if all share one mask. Heads are key/value heads; under bits also
        query heads."""
        return 1, 1

    def head_of(self, query_head: int, heads: int) -> int:
        """The mask's head for a query head. ``heads``: number of query heads."""
        return query_head * self.spread[1] // heads

    def at(self, batch: int, head: int) -> Mask:
        """The mask of one sequence and key/value head."""
        return self

    def misfit(
        self, batch: int, kv_heads: int, seqlen_q: int | None = None, seqlen_k: int | None = None,
        packed: bool = False,
    ) -> str | None:  # fmt: skip
        """Why the mask does not fit arrays of these sizes, and the cure; None if it fits. Lengths are None for
        sequences of different lengths in a cache. ``packed``: the lengths are the most of any packed sequence."""
        if self.matrix is not None and self.matrix != (seqlen_q, seqlen_k):
            rows, keys = self.matrix
            this = f"is a matrix of {rows:,} queries and {keys:,} keys"
            if seqlen_q is None or seqlen_k is None:
                return f"{this}, which calls with a cache do not take: use another builder of cufa.masks"
            lengths = f"{seqlen_q:,} queries and {seqlen_k:,} keys"
            if not packed:
                return f"{this}, not of {lengths}: make it for one call's lengths"
            if rows < seqlen_q or keys < seqlen_k:
                return f"{this}, but a packed sequence has up to {lengths}{PAD}"
        for count, given, name in zip(
            self.spread, (batch, kv_heads), ("sequences", "key/value heads"), strict=True
        ):
            if count not in (1, given):
                cure = f"make it for {given}" + (", or for 1 that all share" if given > 1 else "")
                return f"is of {count} {name} but k has {given}: {cure}"
        return None

    @property
    def known(self) -> bool:
        """All arrays of the mask are on the host. If not, plans count the tiles of :attr:`outline`."""
        return True

    @property
    def outline(self) -> Mask:
        """A mask without GPU arrays under which every score is visible that is visible under this mask."""
        return self

    def on_host(self) -> Mask:
        """The same mask with its arrays on the host. Synchronises with their GPU."""
        return self

    # --- What kernels must do for it ----------------------------------------------------------------------

    @property
    def irregular_kind(self) -> str:
        """Empty for a band mask; for an irregular mask a name of :data:`cufa.problem.problem.MASK_KINDS`. (No kernel
        serves the name of a class that does not define this.)"""
        return type(self).__name__.lower()

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        """(first, last) of the band in a mask: row i sees keys i + first … i + last, None is unbounded. This is the
        whole mask if :attr:`irregular_kind` is ""."""
        raise self._missing("edges")

    def key_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Tiles:
        """Key tiles of each query block."""
        keys = _blocks(seqlen_k, block_kv)
        whole = keys[1] - keys[0] == block_kv
        parts = []
        for q_first, q_end in _some_blocks(_blocks(seqlen_q, block_q), len(keys[0])):
            some, every = self.rectangles(q_first, q_end, *keys, seqlen_q, seqlen_k)
            parts.append(classes_of(some, every & whole))
        return TileLists.of(parts)

    def visits(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Ints:
        """The number of key tiles of each query block. Unlike :meth:`key_tiles`, masks by key count in time that grows
        with seqlen, not with its square."""
        return self.key_tiles(block_q, block_kv, seqlen_q, seqlen_k).count

    def query_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Tiles:
        """The transpose: query tiles of each key block."""
        rows = _blocks(seqlen_q, block_q)
        whole = (rows[1] - rows[0] == block_q)[:, None]
        parts = []
        for k_first, k_end in _some_blocks(_blocks(seqlen_k, block_kv), len(rows[0])):
            some, every = self.rectangles(*rows, k_first, k_end, seqlen_q, seqlen_k)
            parts.append(classes_of(some, every & whole).T)
        return TileLists.of(parts)

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        """For blocks of rows ``q_first`` … ``q_end`` - 1 and adjacent blocks of keys ``k_first`` … ``k_end`` - 1: (may
        some score be visible, is every score surely visible), bool (blocks of rows, blocks of keys) each."""
        mask = self._read_by_kernels("rectangles", seqlen_q, seqlen_k)
        return mask.rectangles(q_first, q_end, k_first, k_end, seqlen_q, seqlen_k)

    def for_kernels(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The same mask as kernels read it: a band, columns with runs for each of ``seqlen_k`` keys, or bits."""
        return self

    reads_lengths: ClassVar[bool] = False
    """The host makes what kernels read from the lengths of each sequence (:meth:`for_sequences`)."""

    def for_sequences(self, lengths: tuple[tuple[int, int], ...], seqlen_q: int, seqlen_k: int) -> Mask:
        """:meth:`for_kernels`, for sequences of different (queries, keys), at most ``seqlen_q`` and ``seqlen_k``."""
        return self.for_kernels(seqlen_q, seqlen_k)

    def _read_by_kernels(self, method: str, seqlen_q: int, seqlen_k: int) -> Mask:
        """The mask of :meth:`for_kernels`, for families that do not define ``method``. Raises NotImplementedError if
        that is this mask."""
        found = self.for_kernels(seqlen_q, seqlen_k)
        if found is self:
            raise self._missing(method)
        return found

    def params(self, seqlen_q: int, seqlen_k: int, by_key: bool = False) -> dict[str, int | Integers]:
        """Members of ``MaskParams`` (cuda_src/shared/params.cuh) other than ``workspace``; an array is a pointer there.
        ``by_key``: for kernels whose blocks keep keys. Call it on the mask of :meth:`for_kernels`."""
        return {}

    def classes_in_advance(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Items that a pass before the kernel computes, a warp each: extremes of key blocks, or classes of tiles. Call
        it on the mask of :meth:`for_kernels`."""
        return 0

    workspace_holds: ClassVar[str] = ""
    """Words for the contents of :meth:`workspace_bytes`."""

    def workspace_bytes(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Bytes about the mask at the end of the kernel's workspace. Call it on the mask of :meth:`for_kernels`."""
        return 0

    # --- How much is visible ------------------------------------------------------------------------------

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        """Visible scores of one head."""
        return int(self.visible_per_key(seqlen_q, seqlen_k).sum())

    def visible_per_key(
        self, seqlen_q: int, seqlen_k: int, first_row: int = 0, end_row: int | None = None
    ) -> Ints:
        """How many of the rows ``first_row`` … ``end_row`` - 1 see each key, int64 (seqlen_k,)."""
        mask = self._read_by_kernels("visible_per_key", seqlen_q, seqlen_k)
        return mask.visible_per_key(seqlen_q, seqlen_k, first_row, end_row)

    # --- Operators ----------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        """A query sees the keys that it sees under both masks. Raises ValueError for masks of other lengths, and for
        numbers on a GPU."""
        from .combined import combined

        return combined("and", self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        """A query sees the keys that it sees under one of the masks, or both. Raises as ``&`` does."""
        from .combined import combined

        return combined("or", self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        """A query sees the keys that it does not see under this mask. Raises as ``&`` does."""
        from .combined import combined

        return combined("not", self)

    # --- Text, pictures, records --------------------------------------------------------------------------

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"masks of class {type(self).__name__} define no {method}(): pass one made by cufa.masks"
        )

    def figure(
        self, seqlen_q: int | None = None, seqlen_k: int | None = None, batch: int = 0, head: int = 0
    ) -> Any:
        """A picture of :meth:`dense` as a Plotly figure; lengths default to those of the mask's own arrays, or to 64.
        Raises ImportError if Plotly is not installed."""
        from .mask_pictures import figure

        return figure(self, seqlen_q, seqlen_k, batch, head)

    def _repr_html_(self) -> str:
        """For notebooks: the same picture, without Plotly."""
        from .mask_pictures import html

        return html(self)

    def __repr__(self) -> str:
        """The call that made the mask, such as ``masks.window(3, 0)``; "<mask TEXT>" if no builder made it."""
        if "_typed" not in self.__dict__:
            return f"<mask {self}>"
        name, values, keywords = self.__dict__["_typed"]
        return (
            f"masks.{name}({', '.join([*map(repr, values), *(f'{k}={x!r}' for k, x in keywords.items())])})"
        )

    def __str__(self) -> str:
        """The name and the fields that differ from their defaults, as pages and tables print them."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = [f"{x.name} {getattr(self, x.name)}" for x in fields if getattr(self, x.name) != x.default]
        return " ".join([type(self).__name__.lower(), *values])

    def as_json(self) -> dict[str, Any]:
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}  # type: ignore[arg-type]
        written = {name: x.as_json() if isinstance(x, (Mask, Integers)) else x for name, x in fields.items()}
        return {"family": type(self).__name__.lower(), **written}

    def name_for_operators(self, pinned: bool) -> str:
        """A name by which :func:`cufa.problem.kept_masks.kept` finds this mask."""
        from .kept_masks import keep

        return keep(self, pinned)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Mask:
        """The mask of a record from :meth:`as_json`. Raises ValueError naming the field, its value and the cure."""
        from .mask_records import read_mask

        return read_mask(record)


PAD = ": pad it (if cu_seqlens are on a GPU, to the rows of q and k)"


def broadcast_count(*counts: int) -> int:
    """Sequences (or heads) after broadcasting (1 broadcasts); 0 if any count is 0."""
    return max(counts) if min(counts) else 0


def _brief(x: Any) -> str:
    """The text of an argument; of an array with more than eight numbers, its dtype and shape."""
    if isinstance(x, np.ndarray):
        return repr(x.tolist()) if x.size <= 8 else f"<{x.dtype} {'×'.join(f'{n:,}' for n in x.shape)}>"
    return f"<{len(x):,} values>" if isinstance(x, (list, tuple)) and len(x) > 8 else repr(x)


def as_typed(builder: Callable[P, MaskT]) -> Callable[P, MaskT]:
    """The builder, with masks that print as the call that made them. An array argument is kept as a short text only.
    Masks with arrays on a GPU print without the call: a training step makes one per batch, and text takes time."""

    @functools.wraps(builder)
    def build(*values: P.args, **keywords: P.kwargs) -> MaskT:
        mask = builder(*values, **keywords)
        if _PLAIN.issuperset(map(type, (*values, *keywords.values()))):  # text is made when it is printed
            mask.__dict__["_typed"] = builder.__name__, values, keywords
        elif mask.known:
            texts = {name: _Text(_brief(x)) for name, x in keywords.items()}
            mask.__dict__["_typed"] = builder.__name__, [_Text(_brief(x)) for x in values], texts
        return mask

    return build


class _Text(str):
    """Prints without quotation marks."""

    __repr__ = str.__str__


_PLAIN = {int, str, bool, type(None)}


def shift_of(diagonal: str | int, seqlen_q: int, seqlen_k: int) -> int:
    """δ of a diagonal: the position of the first query among the keys."""
    if isinstance(diagonal, str):
        return {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}[diagonal]
    return diagonal


def rows_in(seen: list[tuple[Ints, Ints]], hidden: list[tuple[Ints, Ints]], rows: tuple[int, int]) -> Ints:
    """For each key the number of ``rows``, [begin, end), that are in a run of ``seen`` and in no run of ``hidden``,
    which has at most two."""

    def both(*runs: tuple[Any, Any]) -> Ints:
        """Length of the intersection."""
        begin, end = rows
        for first, last in runs:
            begin, end = np.maximum(begin, first), np.minimum(end, last)
        length: Ints = np.maximum(np.subtract(end, begin), 0)
        return length

    def seen_in(*runs: tuple[Ints, Ints]) -> Ints:
        a, b = seen
        return both(a, *runs) + both(b, *runs) - both(a, b, *runs)

    count = seen_in() - sum(seen_in(run) for run in hidden)
    return count + seen_in(*hidden) if len(hidden) == 2 else count


def _blocks(size: int, block: int) -> tuple[Ints, Ints]:
    """First row and end of each block."""
    first = np.arange(0, size, block, dtype=np.int64)
    return first, np.minimum(first + block, size)


def _some_blocks(blocks: tuple[Ints, Ints], others: int) -> Iterator[tuple[Ints, Ints]]:
    """Slices of the blocks: a matrix of one slice and ``others`` has at most ``_CELLS`` cells."""
    step = max(1, _CELLS // max(others, 1))
    for start in range(0, len(blocks[0]), step):
        yield blocks[0][start : start + step], blocks[1][start : start + step]
