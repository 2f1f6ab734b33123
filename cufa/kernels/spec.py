"""What a kernel is: its tile configs, its launches, what it takes. Nothing here needs a GPU or CuPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..core.problem import MAX_HEAD_DIM, Problem
from ..decode.problem import DecodeProblem


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
    column_warps: int = 1
    """Warps that share query rows and split the columns of S and O."""
    switches: tuple[tuple[str, int | bool], ...] = ()
    """Further constants of this kernel's own."""

    def __post_init__(self) -> None:
        # A config read back from JSON has lists here.
        object.__setattr__(self, "switches", tuple((name, value) for name, value in self.switches))

    def __str__(self) -> str:
        warps = f", {self.num_warps} warps" if self.num_warps else ""  # none on a CPU
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        paired = " in pairs" if self.column_warps == 2 else ""
        return f"{self.block_q}×{self.block_kv}{warps}{paired}{stages}"

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
    dependent: bool = False
    """Its blocks may become resident while the launch before ends, and wait for it themselves (sm_90)."""
    persistent: bool = False
    """The blocks share out the work: the planner launches no more than the GPU runs at once."""
    cluster: int = 1
    """Blocks along the first axis of the grid that run together and share their memory (sm_90)."""

    def __str__(self) -> str:
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        memory = f"{self.shared_memory:,} B shared"
        return f"{self.entry} grid {self.grid}, {self.num_threads} threads, {memory}{clusters}"


def launch_lines(launches: Sequence[Launch], workspace: int | None, reasons: Sequence[str]) -> list[str]:
    """The end of every printed plan. ``workspace`` is None where there is no GPU to have one."""
    return [
        *(f"launch     {launch}" for launch in launches),
        *([] if workspace is None else [f"workspace  {workspace:,} B"]),
        *(f"because    {reason}" for reason in reasons),
    ]


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """What a kernel is and how it is launched; shapes come from a :class:`~cufa.core.problem.Problem`."""

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
    launches: Callable[..., tuple[Launch, ...]]
    """(problem, config, shared memory) → launches, in order. Decode kernels: also the splits."""
    workspace: Callable[..., int] = lambda problem, config: 0
    """(problem, config) → device memory in bytes beyond inputs and outputs. Decode kernels: also the
    splits."""
    skip_masked_tiles: bool = False
    min_capability: int = 80
    max_capability: int = 999
    """Hopper's own instructions (sm_90a) exist on no other architecture."""
    tensor_map_rows: Callable[[TileConfig], tuple[int, ...]] = lambda config: ()
    """Rows of one box of q, k, v and o, for a kernel that takes them as tensor maps after its parameters.
    Then the copy engine's rules hold: 16-byte aligned rows, positive strides."""
    choose: Callable[[Problem, tuple[TileConfig, ...], int], TileConfig] = lambda problem, fitting, sms: (
        fitting[0]
    )
    """(problem, configs that fit, SMs) → the one to take when nothing was measured (`cufa tune`)."""
    operation: str = "forward"
    """Whose kernel it is, and so what problems it is given: "forward", of ``flash_attention``
    (:class:`~cufa.core.problem.Problem`), or "decode", of ``flash_decode``
    (:class:`~cufa.decode.problem.DecodeProblem`)."""
    further_constants: Callable[[DecodeProblem], dict[str, int | bool]] | None = None
    """Constants of a decode kernel's problem beyond those that all kernels have."""
    cache_dtypes: tuple[str, ...] = ()
    """Decoding: of the cache; empty: that of q."""

    @property
    def uses_copy_engine(self) -> bool:
        return bool(self.tensor_map_rows(self.configs[0]))

    def runs_on(self, capability: int) -> bool:
        return self.min_capability <= capability <= self.max_capability

    @property
    def requirements(self) -> str:
        """What a problem and a GPU must have, in words."""
        newer = " and later" if self.max_capability > self.min_capability else " only"
        rows = ", 16-byte aligned rows, positive strides" if self.uses_copy_engine else ""
        return f"{self.name} serves {', '.join(self.dtypes)} on sm_{self.min_capability}{newer}{rows}"

    def reads_cache(self, problem: DecodeProblem) -> bool:
        """The kernel is for queries of this dtype over a cache of this one."""
        return problem.dtype in self.dtypes and problem.cache_dtype in (self.cache_dtypes or (problem.dtype,))

    def takes(self, problem: Problem | DecodeProblem) -> bool:
        """The kernel can read these operands: dtype, precision, alignment and strides (not: head_dim)."""
        if problem.dtype not in self.dtypes or problem.precision not in self.precisions:
            return False
        if isinstance(problem, DecodeProblem):
            if not self.reads_cache(problem):
                return False
            if problem.cache_dtype == "float8_e4m3" and problem.head_dim % 16:
                return False  # 16 bytes are a row of ldmatrix
            if self.uses_copy_engine and problem.page_size % self.tensor_map_rows(self.configs[0])[0]:
                return False  # a box lies within a page
        return not self.uses_copy_engine or (problem.alignment == 16 and problem.positive_strides)

    def constants(self, problem: Problem | DecodeProblem, config: TileConfig) -> dict[str, int | bool]:
        """Values generated as ``constexpr`` lines in front of the source."""
        further = {}
        if self.further_constants is not None:
            assert isinstance(problem, DecodeProblem)
            further = self.further_constants(problem)
        return {
            "HEAD_DIM": problem.head_dim,
            "BLOCK_Q": config.block_q,
            "BLOCK_KV": config.block_kv,
            "NUM_WARPS": config.num_warps,
            "NUM_STAGES": config.num_stages,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "COLUMN_WARPS": config.column_warps,
            "SMEM_BYTES": self.shared_memory(config, problem.head_dim),
            "ALIGNMENT": problem.alignment,
            "CAUSAL": problem.causal,
            "SKIP_MASKED_TILES": self.skip_masked_tiles,
            "BFLOAT16": problem.dtype == "bfloat16",
            "FLOAT32": problem.dtype == "float32",
            "TF32": problem.precision == "tf32",
            **dict(config.switches),
            **further,
        }


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile_pitch(head_dim: int, itemsize: int, pad_to: int) -> int:
    """Bytes from row to row of a shared-memory tile: ``tile_pitch`` of ``tiles/copy.cuh``."""
    units = ceil_div(head_dim * itemsize, pad_to) * pad_to // 16
    return (units | 1) * 16
