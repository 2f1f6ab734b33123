"""The quantiser to e4m3 (cuda_src/quantize): its builds, launches and argument. It belongs to no plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..problem.float8 import MODES
from ..problem.lengths import LENGTH_KINDS
from .config import Launch, ceil_div

SOURCE = "quantize/kernel.cu"
PARAMETER = "QuantizeParams"
#: Of kernel.cu: tokens of a thread block, its threads.
TOKENS, THREADS = 128, 256
#: x, out, scale, arrived, sums, mean, lengths; signs, strides, sizes.
NUM_MEMBERS = 7 + 4 + 6 + 6
BATCH_BYTES = 8 << 20
"""Of x between maxima and cast: two such batches and their e4m3 stay in the L2 cache (50 MB on an H100)."""
MIN_CAPABILITY = 89
"""From sm_89 on there is an instruction that converts to e4m3."""


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """One build of the quantiser."""

    head_dim: int
    dtype: str
    """"float16", "bfloat16" or "float32"."""
    alignment: int
    """The largest power of two, at most 16, that divides every row's address."""
    lengths: str
    """Of :data:`~cufa.problem.lengths.LENGTH_KINDS`."""
    mode: str
    """Of :data:`~cufa.problem.float8.MODES`."""
    block: int
    """Tokens that share a scale of mode "block"."""
    rotate: bool
    smooth: bool
    transpose: bool
    """Values: written as columns."""

    @property
    def constants(self) -> dict[str, int | bool]:
        """The choices of config.cuh."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT_BYTES": 4 if self.dtype == "float32" else 2,
            "BFLOAT16": self.dtype == "bfloat16",
            "ALIGNMENT": 16 if self.alignment == 16 else 2,
            "LENGTHS": LENGTH_KINDS.index(self.lengths),
            "SCALE_OF": MODES.index(self.mode),
            "SCALE_BLOCK": self.block,
            "ROTATE": self.rotate,
            "SMOOTH": self.smooth,
            "TRANSPOSE": self.transpose,
        }

    @property
    def entries(self) -> tuple[str, ...]:
        """In the order of their launches."""
        of_mean = ("quantize_sums", "quantize_mean") if self.smooth else ()
        return (*of_mean, "quantize", "quantize_scales")

    def blocks(self, sequences: int, seqlen: int) -> int:
        """Blocks of :data:`TOKENS` tokens of all sequences of a head; in transposed values the padding after packed
        sequences has none."""
        if self.lengths == "packed":
            return seqlen // TOKENS + sequences + (not self.transpose)
        return sequences * ceil_div(seqlen, TOKENS)

    def batch_heads(self, sequences: int, heads: int, seqlen: int) -> int:
        """Heads whose maxima are found together; all, if they share a scale."""
        bytes_of_head = (
            self.blocks(sequences, seqlen) * TOKENS * self.head_dim * (4 if self.dtype == "float32" else 2)
        )
        return heads if self.mode == "tensor" else max(min(BATCH_BYTES // bytes_of_head, heads), 1)

    def launches(self, sequences: int, heads: int, seqlen: int, num_scales: int) -> tuple[Launch, ...]:
        """One for each of :attr:`entries`."""
        blocks, batch_heads = self.blocks(sequences, seqlen), self.batch_heads(sequences, heads, seqlen)
        rounds = ceil_div(heads, batch_heads) * (1 if self.mode == "token" else 2)
        grids = {
            "quantize_sums": (blocks, heads, 1),
            "quantize_mean": (sequences, heads, 1),
            "quantize": (blocks * batch_heads * rounds, 1, 1),
            "quantize_scales": (ceil_div(num_scales, THREADS), 1, 1),
        }
        shared = {
            "quantize": self.head_dim * TOKENS * self.transpose,
            "quantize_sums": THREADS // 32 * self.head_dim * 8,
        }
        return tuple(Launch(x, grids[x], THREADS, shared.get(x, 0)) for x in self.entries)

    def workspace(self, sequences: int, heads: int, seqlen: int) -> tuple[int, int]:
        """Bytes of the sums and of the means; 0 without smoothing."""
        rows = self.blocks(sequences, seqlen) * 8, sequences * 4
        of_sums, of_means = (n * heads * self.head_dim * self.smooth for n in rows)
        return of_sums, of_means

    def numbers(
        self, pointers: Sequence[int], sign_bits: bytes, x: Any, out: Any, sequences: int, num_scales: int
    ) -> list[int]:
        """The members of ``QuantizeParams``. ``pointers``: of x, out, scale, arrived, sums, mean and lengths. ``x`` and
        ``out`` have the axes (batch, heads, seqlen, head_dim), or (batch, heads, head_dim, positions)."""
        bits = sign_bits.ljust(32, b"\0")
        signs = [int.from_bytes(bits[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        _, heads, seqlen, _ = x.shape
        batch_heads = self.batch_heads(sequences, heads, seqlen)
        sizes = [sequences, heads, seqlen, self.blocks(sequences, seqlen), batch_heads, num_scales]
        return [*pointers, *signs, *x.strides[:3], *out.strides[:3], *sizes]
