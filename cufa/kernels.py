"""The registry: every kernel as one literal.

The API, planner, compiler, tests, benchmark, command line and dashboard iterate :data:`KERNELS`.
Adding a kernel is one file under ``cuda_src/kernels`` and one entry here. Nothing in this module needs a
GPU or CuPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .problem import MAX_HEAD_DIM, Problem


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compile-time tiling of a kernel."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1
    """Key/value tiles in flight in shared memory."""
    blocks_per_sm: int = 1
    """Thread blocks an SM the register allocator aims for (``__launch_bounds__``)."""
    max_head_dim: int = MAX_HEAD_DIM
    """Larger head dims spill or do not fit: not built."""
    min_head_dim: int = 8

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.block_q}×{self.block_kv}, {self.num_warps} warps{stages}"

    def fits(self, head_dim: int) -> bool:
        return self.min_head_dim <= head_dim <= self.max_head_dim


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan."""

    entry: str
    """extern "C" name in the source file."""
    grid: tuple[int, int, int]
    num_threads: int
    shared_memory: int
    """Dynamic shared memory, bytes."""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """What a kernel is and how it is launched; shapes come from a :class:`~cufa.problem.Problem`."""

    name: str
    algorithm: str
    """What ``flash_attention(algorithm=…)`` calls it. Two specs may share it with disjoint dtypes."""
    title: str
    paper: str
    source: str
    """File under ``cuda_src/kernels``."""
    dtypes: tuple[str, ...]
    precisions: tuple[str, ...]
    configs: tuple[TileConfig, ...]
    """In order of preference; all of them are built by ``cufa compile`` and tried by ``cufa tune``."""
    shared_memory: Callable[[TileConfig, int], int]
    """(config, head_dim) → dynamic shared memory in bytes. The kernel static_asserts the same figure."""
    launches: Callable[[Problem, TileConfig, int], tuple[Launch, ...]]
    """(problem, config, shared memory) → launches, in order, on one stream."""
    workspace: Callable[[Problem, TileConfig], int] = lambda problem, config: 0
    """Device memory in bytes beyond inputs and outputs."""
    skip_masked_tiles: bool = False
    min_capability: int = 80
    choose: Callable[[Problem, tuple[TileConfig, ...]], TileConfig] = lambda problem, fitting: fitting[0]
    """Pick among the configs that fit (untuned heuristic)."""

    def constants(self, problem: Problem, config: TileConfig) -> dict[str, int | bool]:
        """Values generated as ``constexpr`` lines in front of the source."""
        return {
            "HEAD_DIM": problem.head_dim,
            "BLOCK_Q": config.block_q,
            "BLOCK_KV": config.block_kv,
            "NUM_WARPS": config.num_warps,
            "NUM_STAGES": config.num_stages,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "SMEM_BYTES": self.shared_memory(config, problem.head_dim),
            "ALIGNMENT": problem.alignment,
            "CAUSAL": problem.causal,
            "SKIP_MASKED_TILES": self.skip_masked_tiles,
            "BFLOAT16": problem.dtype == "bfloat16",
            "TF32": problem.precision == "tf32",
        }


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


KERNELS: dict[str, KernelSpec] = {}
