"""How long the sequences of a call are, and where their keys and values lie.

Dense arrays are as long as their shapes say. A cache has room for ``seqlen_k`` keys per sequence; how many are
valid may be known on the device alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Sequence_ = tuple[int, slice, slice, slice]
"""Its number, and slices of arrays (batch, heads, seqlen, head_dim): of batch, of its queries, of its keys."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Dense, unless a subclass says otherwise."""

    @property
    def ragged(self) -> bool:
        """Lengths differ from sequence to sequence and are read on the device."""
        return False

    def sequences(self, batch: int, seqlen_q: int, seqlen_k: int) -> list[Sequence_] | None:
        """Where each sequence lies; None: all are as long as the arrays."""
        return None

    def as_json(self) -> dict[str, Any]:
        return {"kind": type(self).__name__.lower(), **dataclasses.asdict(self)}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Lengths:
        fields = {name: value for name, value in record.items() if name != "kind"}
        return {"lengths": Lengths, "cached": Cached}[record["kind"]](**fields)

    def __str__(self) -> str:
        return "dense"


@dataclasses.dataclass(frozen=True)
class Cached(Lengths):
    """Keys and values stand in a cache, contiguous or in pages; the queries are the last of each sequence."""

    page_size: int = 0
    """Tokens per page; 0: contiguous."""
    max_pages: int = 0
    """Entries of one sequence in the block table."""
    num_pages: int = 0
    """Pages that exist."""
    given: bool = False
    """Lengths are given (``cache_seqlens``); else every sequence fills its capacity."""
    new_tokens: int = 0
    """Tokens of ``k_new``, appended to the cache by the call."""

    @property
    def ragged(self) -> bool:
        return self.given

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    def __str__(self) -> str:
        where = f"pages of {self.page_size}" if self.paged else "cached"
        return where + (f", {self.new_tokens} appended" if self.new_tokens else "")


DENSE = Lengths()
