"""What is to be computed: one frozen record, free of arrays, devices and tile sizes."""

from __future__ import annotations

import dataclasses
import math

#: Bytes of one element, by the dtype name that :class:`Problem` carries.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: head_dim must be a multiple of this, and at most :data:`MAX_HEAD_DIM`.
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call, ``softmax(scale * Q Kᵀ) V``, as numbers.

    Shapes are in the order (batch, heads, seqlen, head_dim), whatever the layout of the arrays was:
    strides are a matter of the launch, not of the problem.

    ``precision`` is ``"float32"`` or ``"tf32"`` for float32 inputs and ``"native"`` for every other
    dtype. ``alignment`` is the largest power of two, at most 16, that divides every pointer and every
    stride in bytes: it decides how wide the copies can be. ``positive_strides`` is False for broadcast or
    reversed axes of q, k or v, which Hopper's copy engine does not take.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    scale: float = 1.0
    precision: str = "native"
    alignment: int = 16
    positive_strides: bool = True

    @property
    def empty(self) -> bool:
        """No query, or queries that have no key at all: not worth a launch, and grids cannot be empty."""
        return 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k, v and o."""
        queries = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        keys = (self.batch, self.kv_heads, self.seqlen_k, self.head_dim)
        return queries, keys, keys, queries

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (1: MHA, ``heads``: MQA)."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def causal_offset(self) -> int:
        """Query row i sees keys up to ``i + causal_offset``: bottom-right alignment."""
        return self.seqlen_k - self.seqlen_q

    @property
    def visible_scores(self) -> int:
        """Score entries of one head that the mask lets through."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        # Row i sees clamp(i + 1 + offset, 0, Sk) keys; offset = Sk - Sq makes that an arithmetic series.
        longest = self.seqlen_k
        rows = min(self.seqlen_q, self.seqlen_k)
        return rows * longest - rows * (rows - 1) // 2

    @property
    def flops(self) -> int:
        """Useful floating-point operations of the forward pass: 4 · head_dim per visible score."""
        return 4 * self.batch * self.heads * self.head_dim * self.visible_scores

    @property
    def io_bytes(self) -> int:
        """Compulsory device-memory traffic: q, k, v read once, o written once."""
        queries = 2 * self.batch * self.heads * self.seqlen_q
        keys = 2 * self.batch * self.kv_heads * self.seqlen_k
        return (queries + keys) * self.head_dim * self.itemsize

    def __str__(self) -> str:
        heads = str(self.heads) if self.group_size == 1 else f"{self.heads}/{self.kv_heads}"
        kind = "causal" if self.causal else "full"
        dtype = f"{self.dtype} (tf32)" if self.precision == "tf32" else self.dtype
        return (
            f"batch {self.batch}, heads {heads}, seqlen {self.seqlen_q}×{self.seqlen_k}, "
            f"head_dim {self.head_dim}, {dtype}, {kind}"
        )


def default_scale(head_dim: int) -> float:
    """1/√head_dim, the softmax scale of the Transformer paper (section 3.2.1)."""
    return 1.0 / math.sqrt(head_dim)
