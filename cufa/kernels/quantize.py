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
"""Tokens of a thread block."""
NUM_MEMBERS = 7 + 4 + 6 + 5
"""Members of ``QuantizeParams``: pointers, words of signs, strides, sizes."""
MIN_CAPABILITY = 89
"""sm_89 is the first architecture with an instruction that converts to e4m3."""
_THREADS_OF_SM = 1024


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """One build of the quantiser."""

    head_dim: int
    dtype: str
    """"float16", "bfloat16" or "float32"."""
    alignment: int
    """The largest power of two, at most 16, that divides every row's address."""
    lengths: str
    """One of :data:`~cufa.problem.lengths.LENGTH_KINDS`."""
    mode: str
    """One of :data:`~cufa.problem.float8.MODES`."""
    block: int
    """Tokens that share a scale of mode "block"."""
    rotate: bool
    smooth: bool
    transpose: bool
    """Values: written as V^T."""

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
        if self.transpose:
            return self._lanes * TOKENS // 4
        return TOKENS * (4 if self.head_dim <= 128 else 8)

    @property
    def _lanes(self) -> int:
        """Threads of a row, eight columns each."""
        return 1 << (ceil_div(self.head_dim, 8) - 1).bit_length()

    def blocks(self, sequences: int, seqlen: int) -> int:
        """Thread blocks of a head, over all sequences. A sequence has whole units of 128 tokens."""
        packed = seqlen // KEY_PADDING + sequences + 1
        units = packed if self.lengths == "packed" else sequences * ceil_div(seqlen, KEY_PADDING)
        return units * KEY_PADDING // TOKENS

    def launches(self, sequences: int, heads: int, seqlen: int, num_sms: int) -> tuple[Launch, ...]:
        """The launches, in order."""
        blocks = self.blocks(sequences, seqlen) * heads
        lead = self.lead(sequences, heads, seqlen, num_sms)
        sums = TOKENS // 4 * self.head_dim * 8
        mean_launches = (
            Launch("quantize_sums", (blocks, 1, 1), self._lanes * TOKENS // 4, sums),
            Launch("quantize_mean", (sequences, heads, 1), 256, 0),
        )
        tile = self.head_dim * TOKENS * self.transpose
        exchange = 2 * 2 * self.num_threads // 32 * 4
        cast = Launch("quantize", (blocks + lead, 1, 1), self.num_threads, tile + exchange)
        return (*(mean_launches if self.smooth else ()), cast)

    def lead(self, sequences: int, heads: int, seqlen: int, num_sms: int) -> int:
        """By how many thread blocks the maxima run ahead of the cast. All blocks that share a scale must have started.
        The GPU's resident blocks are added, so that most maxima are published when the cast needs them."""
        if self.mode == "token":
            return 0
        blocks = self.blocks(sequences, seqlen)
        sharing = {
            "tensor": blocks * heads,
            "head": blocks if self.lengths == "packed" else blocks // sequences,
            "block": ceil_div(self.block, TOKENS) + 1,
        }[self.mode]
        return min(sharing + num_sms * (_THREADS_OF_SM // self.num_threads), blocks * heads)

    def zeros(self, sequences: int, heads: int, seqlen: int) -> int:
        """32-bit words after the scales, zeros at first: the maxima of each block."""
        words = {"token": 0, "block": 2}.get(self.mode, 1)
        return words * self.blocks(sequences, seqlen) * heads

    def workspace(self, sequences: int, heads: int, seqlen: int) -> tuple[int, int]:
        """Bytes of the sums and of the means; 0 without smoothing."""
        rows = self.blocks(sequences, seqlen) * 8, sequences * 4
        sum_bytes, mean_bytes = (n * heads * self.head_dim * self.smooth for n in rows)
        return sum_bytes, mean_bytes

    def numbers(
        self,
        pointers: Sequence[int],
        sign_bits: bytes,
        x: Any,
        out: Any,
        sequences: int,
        num_scales: int,
        num_sms: int,
    ) -> list[int]:
        """The members of ``QuantizeParams``. ``pointers``: of x, out, scale and the words after the scales, sums, mean
        and lengths. ``x`` and ``out`` have the axes (batch, heads, seqlen, head_dim), or (batch, heads, head_dim,
        positions)."""
        maxima = pointers[2] + 4 * num_scales
        bits = sign_bits.ljust(32, b"\0")
        signs = [int.from_bytes(bits[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        _, heads, seqlen, _ = x.shape
        lead = self.lead(sequences, heads, seqlen, num_sms)
        sizes = [sequences, heads, seqlen, self.blocks(sequences, seqlen), lead]
        strides = *x.strides[:3], *out.strides[:3]
        return [*pointers[:3], maxima, *pointers[3:], *signs, *strides, *sizes]
