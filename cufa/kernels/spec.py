"""What a kernel is: its tile configs, its launches, what it takes. Nothing here needs a GPU or CuPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from ..core.mask import Band
from ..core.operation import Split
from ..core.order import Order
from ..core.problem import MASK_KINDS, MAX_HEAD_DIM, Problem
from ..core.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compile-time tiling of a kernel."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1
    """Key/value tiles in flight in shared memory."""
    blocks_per_sm: int = 1
    """Thread blocks per SM that the register allocator aims for (``__launch_bounds__``)."""
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


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """What a kernel is and how it is launched; shapes come from a :class:`~cufa.core.problem.Problem`."""

    name: str
    algorithm: str
    """What the public call's ``algorithm=`` or ``schedule=`` names. Specs may share it with disjoint dtypes."""
    title: str
    paper: str
    source: str
    """File under ``cuda_src/kernels``."""
    dtypes: tuple[str, ...]
    """Elements of q that it serves."""
    precisions: tuple[str, ...]
    configs: tuple[TileConfig, ...]
    """In order of preference; all of them are built by ``cufa compile`` and tried by ``cufa tune``."""
    shared_memory: Callable[[TileConfig, int], int]
    """(config, head_dim) → dynamic shared memory in bytes. The kernel static_asserts the same figure."""
    launches: Callable[[Problem, TileConfig, int, Split | None], tuple[Launch, ...]]
    """(problem, config, shared memory, split) → launches, in order."""
    workspace: Callable[[Problem, TileConfig, Split | None], int] = lambda problem, config, split: 0
    """(problem, config, split) → device memory in bytes beyond inputs and outputs."""
    workspace_holds: str = ""
    """In words, for printed plans."""
    counters: Callable[[Problem, TileConfig], int] | None = None
    """(problem, config) → 32-bit words that are zero between launches, for a workspace that outlives the call;
    None: the kernel keeps none, and its workspace is the call's own."""
    skip_masked_tiles: bool = False
    min_capability: int = 80
    max_capability: int = 999
    """Hopper's own instructions (sm_90a) exist on no other architecture."""
    tensor_map_rows: Callable[[TileConfig], Mapping[str, int]] = lambda config: {}
    """Rows of one box of each operand that the kernel reads or writes by tensor map.
    Then the copy engine's rules hold: 16-byte aligned rows, positive strides."""
    choose: Callable[[Problem, tuple[TileConfig, ...], int], TileConfig] = lambda problem, fitting, sms: (
        fitting[0]
    )
    """(problem, configs that fit, SMs) → the one to take when nothing was measured (`cufa tune`)."""
    order: Callable[[Problem, Schedule, int], Order | None] = lambda problem, schedule, num_sms: None
    """(problem, schedule, SMs) → who takes which work item when; None: not written down."""
    operation: str = "forward"
    """Whose kernel it is: a name of :data:`cufa.core.operation.OPERATIONS`."""
    further_constants: Callable[[Problem], dict[str, int | bool]] = lambda problem: {}
    """Constants of this kernel's own."""
    k_dtypes: tuple[str, ...] = ()
    """Elements of k and v; empty: that of q."""
    further_refusal: Callable[[KernelSpec, Problem], str | None] = lambda spec, problem: None
    """(spec, problem) → why this kernel does not serve what the other fields would let pass."""

    @property
    def uses_copy_engine(self) -> bool:
        return bool(self.tensor_map_rows(self.configs[0]))

    def runs_on(self, capability: int) -> bool:
        return self.min_capability <= capability <= self.max_capability

    def refuses(self, problem: Problem, capability: int | None = None) -> str | None:
        """Why the kernel does not serve a problem (on a GPU of this capability), or None when it does. Whether
        a config fits the head dim is another question (:func:`cufa.planner.fitting_configs`)."""
        if capability is not None and not self.runs_on(capability):
            newer = " or later" if self.max_capability > self.min_capability else ""
            return f"needs sm_{self.min_capability}{newer}"
        if problem.dtype not in self.dtypes:
            return f"takes {' and '.join(self.dtypes)}, not {problem.dtype}"
        k_dtypes = self.k_dtypes or (problem.dtype,)
        for name, element in (("keys", problem.k_element), ("values", problem.v_element)):
            if element.name not in k_dtypes:
                return f"takes {name} of {' and '.join(k_dtypes)}, not {element.name}"
        if not isinstance(problem.mask, Band):
            return f"serves masks that are bands, not {type(problem.mask).__name__.lower()}"
        if problem.precision not in self.precisions:
            return f"computes in {' and '.join(self.precisions)}, not {problem.precision}"
        if self.uses_copy_engine and problem.alignment != 16:
            return f"needs 16-byte aligned rows, not {problem.alignment}"
        if self.uses_copy_engine and not problem.positive_strides:
            return "needs positive strides"
        if not self.skip_masked_tiles and problem.seqlen_q + problem.seqlen_k >= 2**31:
            return "counts rows and keys together with 32 bits"  # tiles beyond the mask are compared as well
        return self.further_refusal(self, problem)

    def constants(self, problem: Problem, config: TileConfig) -> dict[str, int | bool]:
        """Values generated as ``constexpr`` lines in front of the source."""
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
            "MASK": MASK_KINDS.index(problem.mask_kind),
            "SOFTCAP": problem.softcap is not None,
            "SKIP_MASKED_TILES": self.skip_masked_tiles,
            "BFLOAT16": problem.dtype == "bfloat16",
            "FLOAT32": problem.dtype == "float32",
            "TF32": problem.precision == "tf32",
            **dict(config.switches),
            **self.further_constants(problem),
        }


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile_pitch(head_dim: int, itemsize: int, pad_to: int) -> int:
    """Bytes from row to row of a shared-memory tile: ``tile_pitch`` of ``tiles/copy.cuh``."""
    units = ceil_div(head_dim * itemsize, pad_to) * pad_to // 16
    return (units | 1) * 16
