"""class Float8Kernel: shared by the forward kernels for e4m3."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...problem.float8 import KEY_PADDING, MODES, padded_keys
from ...problem.lengths import Packed
from ...problem.problem import Problem
from ..base import Config, Kernel
from ..config import Launch, Split


class Float8Kernel(Kernel):
    """Inputs of e4m3 with scales, results of 16 bits. Kernels read transposed values: an earlier launch transposes
    values in rows."""

    dtypes = ("float8_e4m3",)
    out_dtypes = ("float16", "bfloat16")
    scales: Mapping[str, tuple[str, ...]] = {
        "q": ("tensor", "head", "block"),
        "k": ("tensor", "head", "block"),
        "v": ("tensor", "head"),
    }
    options = ("padded", "packed")
    head_dim_multiple = 16
    skip_masked_tiles = True
    workspace_holds = "transposed values"

    def with_transposition(self, problem: Problem, attention: Launch) -> tuple[Launch, ...]:
        """``attention``, after the launch that transposes values in rows."""
        if not problem.values_in_rows:
            return (attention,)
        batch, heads, head_dim, keys = transposed_shape(problem)
        grid = batch * keys // KEY_PADDING, heads, 1
        return Launch("transpose_values", grid, 256, head_dim * KEY_PADDING), attention

    def workspace(self, problem: Problem, config: Config, split: Split | None = None) -> int:
        return math.prod(transposed_shape(problem)) if problem.values_in_rows else 0

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        modes = dict(zip("QKV", problem.scales or ("head",) * 3, strict=True))
        return {
            **{f"{name}_SCALE": MODES.index(mode) for name, mode in modes.items()},
            "BFLOAT16": problem.out_element.name == "bfloat16",
        }


def transposed_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Shape of transposed values."""
    (_, _, (batch, heads, keys, head_dim), _) = problem.shapes
    sequences = problem.batch if isinstance(problem.lengths, Packed) else None
    return batch, heads, head_dim, padded_keys(keys, sequences)
