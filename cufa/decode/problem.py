"""What is to be decoded: one frozen record, free of arrays, devices and tile sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..core.problem import ITEMSIZE

#: Most query tokens of one call.
MAX_TOKENS = 16

#: Most tokens of one sequence, cached or new: their sum is a number of 32 bits in the kernels.
MAX_CAPACITY = 2**30 - 1

#: Bytes of one element of the cache, by dtype name.
CACHE_ITEMSIZE = {**ITEMSIZE, "float8_e4m3": 1}


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """One ``flash_decode`` call as numbers, without the sequences' lengths: those stand on the device."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    """Query tokens of each sequence, causal among themselves (bottom-right)."""
    capacity: int
    """Tokens that the cache of one sequence can hold: ``max_pages * page_size`` when it is paged."""
    head_dim: int
    dtype: str
    """Of q, the result and, unless it is an 8-bit one, the cache."""
    cache_dtype: str
    """``dtype``, or ``"float8_e4m3"``."""
    scale: float
    page_size: int = 0
    """Tokens a page; 0: contiguous."""
    max_pages: int = 0
    """Entries of one sequence in the block table."""
    num_pages: int = 0
    """Pages that exist."""
    ragged: bool = False
    """Lengths are given (``cache_seqlens``); else every sequence fills its capacity."""
    new_tokens: int = 0
    """Tokens of ``k_new``, appended to the cache by the call."""
    alignment: int = 16
    """Largest power of two, at most 16, that divides every pointer and every stride in bytes."""
    positive_strides: bool = True

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def rows(self) -> int:
        """Query rows of one key/value head: its query heads times the tokens, packed into one tile."""
        return self.group_size * self.tokens

    @property
    def empty(self) -> bool:
        """No query, or a cache without room: not worth a launch, and grids cannot be empty."""
        return 0 in (self.batch, self.heads, self.capacity)

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of q."""
        return ITEMSIZE[self.dtype]

    @property
    def precision(self) -> str:
        """As :class:`~cufa.core.problem.Problem` has it: decoding has no float32 kernels."""
        return "native"

    @property
    def causal(self) -> bool:
        """Whether rows of one sequence see different keys."""
        return self.tokens > 1

    def valid_keys(self, cache_seqlen: int) -> int:
        """Keys of a sequence once the new tokens are appended, clamped to the capacity as kernels do it."""
        return min(max(cache_seqlen, 0) + self.new_tokens, self.capacity)

    def kv_bytes(self, lengths: Iterable[int] | None = None) -> int:
        """Bytes of keys and values that must be read when sequences have these numbers of valid keys (None:
        all are full)."""
        keys = self.batch * self.capacity if lengths is None else sum(int(n) for n in lengths)
        return 2 * keys * self.kv_heads * self.head_dim * CACHE_ITEMSIZE[self.cache_dtype]

    def __str__(self) -> str:
        heads = str(self.heads) if self.group_size == 1 else f"{self.heads}/{self.kv_heads}"
        tokens = f", {self.tokens} tokens" if self.tokens > 1 else ""
        cache = f" in pages of {self.page_size}" if self.paged else ""
        appended = f", {self.new_tokens} appended" if self.new_tokens else ""
        dtype = self.dtype if self.cache_dtype == self.dtype else f"{self.dtype} over {self.cache_dtype}"
        upto = "up to " if self.ragged else ""
        return (
            f"decode batch {self.batch}, heads {heads}{tokens}, {upto}{self.capacity:,} cached{cache}"
            f"{appended}, head_dim {self.head_dim}, {dtype}"
        )
