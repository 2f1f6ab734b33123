"""The quantiser to e4m3 (cuda_src/quantize): its builds, launches and argument. It belongs to no plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..problem.float8 import KEY_PADDING, MODES
from ..problem.lengths import LENGTH_KINDS
from .config import Launch, ceil_div

SOURCE = "quantize/kernel.cu"
PARAMETER = "QuantizeParams"
TOKENS = 64
"""Of a thread block; with eight columns and four tokens a thread."""
NUM_MEMBERS = 9 + 4 + 6 + 6
"""Of ``QuantizeParams``: pointers, words of signs, strides, sizes."""
PATIENCE = 200
"""How often a block looks whether the maxima of other blocks are there, at 0.5 to 1 µs."""
MIN_CAPABILITY = 89
"""From sm_89 on there is an instruction that converts to e4m3."""
_LATE_BLOCKS = 528


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
    def num_threads(self) -> int:
        return (1 << (ceil_div(self.head_dim, 8) - 1).bit_length()) * TOKENS // 4

    def blocks(self, sequences: int, seqlen: int) -> int:
        """Thread blocks of a head, over all sequences. A sequence has whole units of 128 tokens."""
        packed = seqlen // KEY_PADDING + sequences + 1
        units = packed if self.lengths == "packed" else sequences * ceil_div(seqlen, KEY_PADDING)
        return units * KEY_PADDING // TOKENS

    def launches(self, sequences: int, heads: int, seqlen: int) -> tuple[Launch, ...]:
        """In order."""
        blocks, threads = self.blocks(sequences, seqlen) * heads, self.num_threads
        tile = self.head_dim * TOKENS * self.transpose
        sums = TOKENS // 4 * self.head_dim * 8
        of_mean = (
            Launch("quantize_sums", (blocks, 1, 1), threads, sums),
            Launch("quantize_mean", (sequences, heads, 1), 256, 0),
        )
        late = Launch("quantize_late", (min(blocks, _LATE_BLOCKS), 1, 1), threads, tile)
        return (
            *(of_mean if self.smooth else ()),
            Launch("quantize", (blocks, 1, 1), threads, tile + 16),
            *(() if self.mode == "token" else (late,)),
        )

    def patience(self, sequences: int, heads: int, seqlen: int, num_sms: int) -> int:
        """1 if the blocks that share a scale may be more than half of what a GPU runs at once."""
        blocks = self.blocks(sequences, seqlen)
        if self.mode == "tensor":
            blocks *= heads
        elif self.lengths != "packed":
            blocks //= sequences
        return PATIENCE if self.mode == "block" or 2 * blocks <= num_sms * (1024 // self.num_threads) else 1

    def words(self, sequences: int, heads: int, seqlen: int, num_scales: int) -> tuple[int, int]:
        """32-bit words behind the scales: maxima, arrivals and a count, zeros at first; then the list of blocks."""
        if self.mode == "token":
            return 0, 0
        return 2 * num_scales + 1, self.blocks(sequences, seqlen) * heads

    def workspace(self, sequences: int, heads: int, seqlen: int) -> tuple[int, int]:
        """Bytes of the sums and of the means; 0 without smoothing."""
        rows = self.blocks(sequences, seqlen) * 8, sequences * 4
        of_sums, of_means = (n * heads * self.head_dim * self.smooth for n in rows)
        return of_sums, of_means

    def numbers(
        self, pointers: Sequence[int], sign_bits: bytes, x: Any, out: Any, sequences: int, num_scales: int,
        patience: int,
    ) -> list[int]:  # fmt: skip
        """The members of ``QuantizeParams``. ``pointers``: of x, out, scale and the words behind the scales, sums, mean
        and lengths. ``x`` and ``out`` have the axes (batch, heads, seqlen, head_dim), or (batch, heads, head_dim,
        positions)."""
        given, scale, *rest = pointers[:2], pointers[2], *pointers[3:]
        largest = scale + 4 * num_scales
        behind = scale, largest, largest + 4 * num_scales, largest + 8 * num_scales
        bits = sign_bits.ljust(32, b"\0")
        signs = [int.from_bytes(bits[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        _, heads, seqlen, _ = x.shape
        sizes = [sequences, heads, seqlen, self.blocks(sequences, seqlen), num_scales, patience]
        return [*given, *behind, *rest, *signs, *x.strides[:3], *out.strides[:3], *sizes]
