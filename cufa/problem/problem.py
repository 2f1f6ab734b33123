"""The problem of one call: a frozen value without arrays, devices or tile sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

from .columns import Chunks
from .element import ELEMENTS, Element
from .integers import Integers
from .lengths import DENSE, Cached, Lengths, Packed, Part, parts
from .mask import FULL, Band, Mask, reduced
from .mask_family import Edges
from .score_change import ScoreChange
from .work import WORK

#: head_dim must be a multiple of this, and at most :data:`MAX_HEAD_DIM`.
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256

#: Kernels count with 32 bits: the largest size of an axis, and the largest value in a mask.
MAX_SIZE = 2**31 - 1

#: The largest |δ| of a mask's diagonal. With up to 2**30 rows, positions (row + δ) stay below 2**31 - 1, which stands
#: for the end of an unbounded run of rows.
MAX_DIAGONAL = 2**30

#: The kinds of mask that kernels are compiled for: no bound, a right bound, a left bound ("band", with a right bound or
#: without), a band with exempt tokens ("sets"), keys hidden from one run of rows or from two, a bit for each score.
#: MaskKind of cuda_src/shared/mask.cuh.
MASK_KINDS = ("full", "causal", "band", "sets", "columns", "columns2", "bits")

#: The kinds that are band masks.
BAND_KINDS = MASK_KINDS[:3]


@dataclasses.dataclass(frozen=True)
class Kept:
    """The keys that decode kernels read of a sequence under a window with kept first keys."""

    window: int | None
    """Keys at the end of the sequence; None: all."""
    keys: int
    """Keys at the begin of the sequence."""


@dataclasses.dataclass(frozen=True)
class FromChunk:
    """The keys that decode kernels read of a sequence under a mask of chunks: from the first key of the first token's
    chunk on, and all new keys."""

    size: int
    tokens: int
    new_tokens: int

    def first(self, length: int) -> int:
        """The first key that is read of a sequence of ``length`` keys."""
        token = max(length - self.tokens, 0)
        return min(token - token % self.size, max(length - self.new_tokens, 0))

    @property
    def most(self) -> int:
        """Most keys that are read of a sequence."""
        return max(self.size - 1 + self.tokens, self.new_tokens)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of an operation as numbers: ``softmax(scale * Q Kᵀ) V``, or its gradients.

    Shapes are in the order (batch, heads, seqlen, head_dim), whatever the layout of the arrays; strides belong to the
    launch. ``seqlen_q`` and ``seqlen_k`` are the rows that each sequence has in the arrays (packed: the longest
    sequence); ``lengths`` has the valid lengths.

    ``precision`` is ``"float32"`` or ``"tf32"`` for float32 inputs and ``"native"`` for every other
    dtype. ``alignment`` is the largest power of two, at most 16, that divides every pointer and every
    stride in bytes: it decides how wide the copies can be. ``positive_strides`` is False for broadcast or
    reversed axes of operands that Hopper's copy engine would read.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    """Element of q."""
    mask: Mask = FULL
    scale: float = 1.0
    softcap: float | None = None
    precision: str = "native"
    lengths: Lengths = DENSE
    k_dtype: str | None = None
    """Element of k; None: q's element. The next two fields are the same for v and out."""
    v_dtype: str | None = None
    out_dtype: str | None = None
    operation: str = "forward"
    """A name of :data:`cufa.plan.operation.OPERATIONS`."""
    alignment: int = 16
    positive_strides: bool = True
    deterministic: bool = False
    """Backward: dq is added in a fixed order, so that every run gives the same bits."""
    alibi: bool = False
    """Scores have a penalty that grows with the distance of query and key (``alibi_slopes``)."""
    sink: bool = False
    """Each head has a logit that joins the denominator (``sink``)."""
    score: ScoreChange | None = None
    """A function of the caller's changes scores (``score``, ``bias``)."""
    dropped: int = 0
    """Weights dropped at random, per 256 (``dropout``)."""
    scales: tuple[str, ...] = ()
    """Inputs of e4m3: the modes of the scales of q, k and v (:data:`cufa.problem.float8.MODES`)."""
    values_in_rows: bool = False
    """Values of e4m3 are rows, which kernels transpose first; else :class:`cufa.QuantizedValues`."""
    tree: str = ""
    """A kind of :data:`cufa.problem.tree.TREE_KINDS`: among the new tokens, each sees its ancestors and itself.
    (Forward: ``mask`` is then a :class:`~cufa.problem.tree.Tree`.)"""
    softmax_max: str | float = ""
    """Decode: the maximum that the softmax subtracts. "": each row's own maximum; "bound": a bound of the row's scores;
    a number: the caller's, for all heads; "heads": the caller's, one per head."""
    invariant: bool = False
    """Keys in a cache: the bits of a sequence's result depend on that sequence alone."""
    accumulate: str = "auto"
    """Inputs of e4m3: when P V is added to O in float32: after each "tile", after a number of tiles (as text), or after
    the last tile of a "row". "auto": by length."""
    v_head_dim: int | None = None
    """Head dim of v and out; None: :attr:`head_dim`. See :attr:`v_dim`."""
    running: tuple[int, int, int, int] | None = None
    """Forward: the result joins a running result of earlier keys, O and lse in float32. (First and end of the rows
    without an earlier result, first and end of the rows that are finished and go to out.)"""
    float32_gradients: tuple[str, ...] = ()
    """Backward of 16-bit elements: the results that are float32; "dk" and "dv" only together. The caller adds them to
    the results of other calls, and rounds the sum."""

    # --- Elements -----------------------------------------------------------------------------------------

    @property
    def q_element(self) -> Element:
        return ELEMENTS[self.dtype]

    @property
    def k_element(self) -> Element:
        return ELEMENTS[self.k_dtype or self.dtype]

    @property
    def v_element(self) -> Element:
        return ELEMENTS[self.v_dtype or self.dtype]

    @property
    def out_element(self) -> Element:
        return ELEMENTS[self.out_dtype or self.dtype]

    @property
    def lse_dtype(self) -> str:
        """dtype of the log-sum-exp, and of scores."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if isinstance(self.lengths, Packed):
            return self.heads, self.lengths.total_q
        return self.batch, self.heads, self.seqlen_q

    @property
    def v_dim(self) -> int:
        """Head dim of v and out."""
        return self.v_head_dim or self.head_dim

    @property
    def dims_text(self) -> str:
        """Head dims as pages and tables print them: 128, or 192/128 if v has another head dim."""
        return str(self.head_dim) if self.v_head_dim is None else f"{self.head_dim}/{self.v_head_dim}"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of q."""
        return self.q_element.itemsize

    # --- Sizes --------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """An axis is 0: nothing is launched, because grids cannot be empty."""
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    @property
    def tokens(self) -> tuple[int, int]:
        """Sums over all sequences: (queries, keys)."""
        return self.lengths.tokens(self.batch, self.seqlen_q, self.seqlen_k)

    def query_blocks(self, block: int) -> int:
        """Query blocks of one head, over all sequences."""
        return self.lengths.blocks(block, self.batch, self.seqlen_q)

    def key_blocks(self, block: int) -> int:
        """Key blocks of one head, over all sequences."""
        return self.lengths.blocks(block, self.batch, self.seqlen_k, of_keys=True)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of q, k, v and o. Packed sequences lie in arrays with batch 1."""
        outer = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if isinstance(self.lengths, Packed):
            outer = (1, self.lengths.total_q), (1, self.lengths.total_k)
        (batch, rows), (_, keys) = outer
        q_axes, k_axes = (batch, self.heads, rows), (batch, self.kv_heads, keys)
        qk, v = self.head_dim, self.v_dim
        return (*q_axes, qk), (*k_axes, qk), (*k_axes, v), (*q_axes, v)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (1: MHA, ``heads``: MQA)."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def rows(self) -> int:
        """Query rows of one key/value head: its query heads times the queries, packed into one tile."""
        return self.group_size * self.seqlen_q

    # --- Mask ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def edges(self) -> Edges:
        """(first, last) of a band mask: row i sees keys i + first … i + last. A bound that hides nothing is None.
        Raises NotImplementedError for other masks."""
        if self.mask.irregular_kind in MASK_KINDS:
            raise NotImplementedError(f"{self.mask} is more than a band with two edges")
        found = self.mask.edges(self.seqlen_q, self.seqlen_k)
        if self.lengths.in_cache:
            return found  # one build, and so the same bits, for any number of queries
        return reduced(found, self.seqlen_q, self.seqlen_k)

    @property
    def mask_kind(self) -> str:
        """One of :data:`MASK_KINDS`: what a kernel has to test."""
        if self.mask.irregular_kind:
            return self.mask.irregular_kind
        first, last = self.edges
        return "band" if first is not None else "full" if last is None else "causal"

    @property
    def kernel_mask(self) -> Mask:
        """The mask as kernels read it: a band, columns or bits; decode kernels read chunks as such."""
        sizes = self.seqlen_q, self.seqlen_k
        if self.operation == "decode" and isinstance(self.mask, Chunks):
            return self.mask
        if self.mask.reads_lengths and (lengths := self.lengths.of_sequences(*sizes)):
            return self.mask.for_sequences(lengths, *sizes)
        return self.mask.for_kernels(*sizes)

    @property
    def mask_params(self) -> dict[str, int | Integers]:
        """The members of ``MaskParams`` that the mask decides; an array is a pointer there."""
        mask, by_key = self.kernel_mask, self.operation == "backward"
        found = mask.params(self.seqlen_q, self.seqlen_k, by_key)
        if self.lengths.ragged and "run_shift" in found:  # as the shift of a band: per sequence
            shift, longer = (mask.params(0, keys, by_key)["run_shift"] for keys in (0, 1))
            assert isinstance(shift, int) and isinstance(longer, int)
            found |= {"run_shift": shift, "run_shift_by_length": longer - shift}
        return found

    @property
    def mask_arrays(self) -> dict[str, Integers]:
        """The arrays among :attr:`mask_params`."""
        return {name: x for name, x in self.mask_params.items() if isinstance(x, Integers)}

    def mask_bytes(self, block_q: int, block_kv: int) -> int:
        """Bytes about the mask that kernels store at the end of the workspace."""
        return self.kernel_mask.workspace_bytes(self.seqlen_q, self.seqlen_k, block_q, block_kv)

    @property
    def later_rows_see_more(self) -> bool:
        """Query blocks differ in length, and the last are the longest: the mask has a right bound only. Also True for
        irregular masks, because most lie within a causal mask."""
        return self.mask_kind not in ("full", "band")

    @property
    def tiles_are_listed(self) -> bool:
        """On Hopper, a warp of the kernel lists the tiles that a query block visits."""
        return bool(self.mask.irregular_kind) or self.lengths.kind != "dense"

    @property
    def visible_scores(self) -> int:
        """Visible scores of one head; if heads differ, the average, rounded down."""
        heads = self.batch * self.heads
        return self.all_visible_scores // heads if heads else 0

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The dense problems with one score matrix each that make up this problem."""
        return parts(self)

    @property
    def known(self) -> bool:
        """Mask and lengths are known on the host. If not, counts of tiles and scores are upper bounds."""
        return self.mask.known and self.lengths.known

    @functools.cached_property
    def all_visible_scores(self) -> int:
        """Visible scores of all heads of all sequences; an upper bound if lengths or mask are known on the GPU only."""
        problems = (part.problem for part in self.parts)
        return sum(p.batch * p.heads * p.mask.visible_scores(p.seqlen_q, p.seqlen_k) for p in problems)

    # --- Cached keys and values ---------------------------------------------------------------------------

    @property
    def cache(self) -> Cached:
        """The cache of a problem whose keys are in one."""
        found = self.lengths if isinstance(self.lengths, Cached) else self.lengths.in_cache
        assert found is not None
        return found

    def valid_keys(self, cache_seqlen: int) -> int:
        """Keys of a sequence after new tokens are appended, clamped to the capacity as in kernels."""
        return min(max(cache_seqlen, 0) + self.cache.new_tokens, self.seqlen_k)

    @property
    def reach(self) -> int | None:
        """Keys that are read at the end of a sequence; None: all. Under a window: from the first key that the first
        query sees, and at least all new keys, which must be stored."""
        if self.mask.irregular_kind:
            return None
        return self._keys_of_window(self.edges)

    def _keys_of_window(self, edges: Edges) -> int | None:
        first, _ = edges
        return None if first is None else max(self.seqlen_k - first, self.cache.new_tokens)

    @property
    def exempt_by_sequence(self) -> bool:
        """Decode: whether kernels read the exempt tokens of each sequence: sequences have numbers of their own, or some
        tokens see every key."""
        if self.operation != "decode" or not isinstance(self.mask, Band):
            return False
        return self.mask.global_tokens != 0 or bool(self.mask_arrays)

    @property
    def uneven(self) -> bool:
        """Decode: whether sequences may differ in the tiles that are read, which the kernel then computes."""
        return self.lengths.ragged or self.exempt_by_sequence

    def kernel_reach_of(self, batch: int | None = None) -> int | Kept | FromChunk | None:
        """As :attr:`reach`, for GPU kernels and sequence ``batch`` (None: the most that any sequence reads). Under a
        window with kept first keys, kernels read these keys and the window; under chunks, the keys from the first
        token's chunk on. The CPU path reads all keys under such masks."""
        mask = self.mask
        if isinstance(mask, Chunks) and self.operation == "decode":
            return FromChunk(mask.size, self.seqlen_q, self.cache.new_tokens)
        if not isinstance(mask, Band) or not mask.irregular_kind:
            return self.reach
        if not mask.known:
            return None  # a number on a GPU may be the whole sequence
        sets = (mask if batch is None else mask.at(batch, 0)).sets
        most = max(x if isinstance(x, int) else int(x.values.max(initial=0)) for x in sets)
        window = self._keys_of_window(mask.edges(self.seqlen_q, self.seqlen_k))
        return Kept(window, min(most, self.seqlen_k))

    @property
    def kernel_reach(self) -> int | Kept | FromChunk | None:
        """:meth:`kernel_reach_of`: the most that any sequence reads."""
        return self.kernel_reach_of()

    @property
    def visible_capacity(self) -> int:
        """Most keys of a sequence that are read."""
        reach = self.kernel_reach
        if isinstance(reach, FromChunk):
            reach = reach.most
        kept = reach if isinstance(reach, Kept) else Kept(reach, 0)
        return self.seqlen_k if kept.window is None else min(self.seqlen_k, kept.keys + kept.window)

    def kv_bytes(self, lengths: Iterable[int] | None = None) -> int:
        """Bytes of keys and values that must be read. ``lengths``: valid keys of each sequence (None: all are full).
        Keys that a window hides from every query are not read."""
        valid = [self.seqlen_k] * self.batch if lengths is None else lengths
        keys = sum(min(int(n), self.visible_capacity) for n in valid)
        return keys * self.kv_heads * self.key_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value."""
        return self.head_dim * self.k_element.itemsize + self.v_dim * self.v_element.itemsize

    # --- Work ---------------------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """Useful floating-point operations: forward and decode 2·head_dim + 2·v_dim per visible score, backward
        6·head_dim + 4·v_dim."""
        return WORK[self.operation].flops(self)

    @property
    def io_bytes(self) -> int:
        """Compulsory device-memory traffic in bytes: every operand once."""
        return WORK[self.operation].io_bytes(self)

    # --- Records and text ---------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("v_head_dim", "running", "score"):
            if fields[name] is None:
                del fields[name]
        for name in ("dropped", "float32_gradients"):
            if not fields[name]:
                del fields[name]
        if self.score is not None:
            fields["score"] = self.score.as_json()
        return {**fields, "mask": self.mask.as_json(), "lengths": self.lengths.as_json()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Problem:
        return cls(
            **{
                **record,
                "scales": tuple(record.get("scales", ())),
                "score": ScoreChange.from_json(record["score"]) if record.get("score") else None,
                "float32_gradients": tuple(record.get("float32_gradients", ())),
                "running": None if record.get("running") is None else tuple(record["running"]),
                "mask": Mask.from_json(record["mask"]),
                "lengths": Lengths.from_json(record["lengths"]),
            }
        )

    def __str__(self) -> str:
        return WORK[self.operation].describe(self)

    @property
    def heads_text(self) -> str:
        return str(self.heads) if self.group_size == 1 else f"{self.heads}/{self.kv_heads}"

    @property
    def scores_text(self) -> str:
        """Mask and score changes, as every page and table prints them."""
        cap = f", softcap {self.softcap:g}" if self.softcap is not None else ""
        score = f", score {self.score}" if self.score is not None else ""
        fixed = f", maximum {self.softmax_max}" if self.softmax_max != "" else ""
        dropout = f", dropout {self.dropped / 256:.3g}" if self.dropped else ""
        few = ", ALiBi" * self.alibi + ", sink" * self.sink + dropout + fixed + ", invariant" * self.invariant
        return str(self.mask) + score + cap + few + ", tree" * bool(self.tree)


def default_scale(head_dim: int) -> float:
    """1/√head_dim, the softmax scale of the Transformer (Vaswani et al., 2017, section 3.2.1)."""
    return 1.0 / math.sqrt(head_dim)
