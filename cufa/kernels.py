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
    persistent: bool = False
    """The blocks share out the work: the planner launches no more than the GPU runs at once."""


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
    max_capability: int = 999
    """Hopper's own instructions (sm_90a) exist on no other architecture."""
    tensor_map_rows: Callable[[TileConfig], tuple[int, ...]] = lambda config: ()
    """Rows of one box of q, k and v, for a kernel that takes them as tensor maps after its parameters. Then
    the copy engine's rules hold: 16-byte aligned rows, positive strides."""
    choose: Callable[[Problem, tuple[TileConfig, ...]], TileConfig] = lambda problem, fitting: fitting[0]
    """Pick among the configs that fit (untuned heuristic)."""
    stalls: Callable[[Problem, TileConfig, int], bool] = lambda problem, config, num_sms: False
    """(problem, config, SMs) → True where the kernel is known to wait for ever: never planned."""
    allowed_spill_bytes: int = 0
    """Bytes a thread may spill without failing `cufa compile`; more than 0 only with figures beside it."""

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

    def takes(self, problem: Problem) -> bool:
        """The kernel can read these operands: dtype, precision, alignment and strides (not: head_dim)."""
        if problem.dtype not in self.dtypes or problem.precision not in self.precisions:
            return False
        return not self.uses_copy_engine or (problem.alignment == 16 and problem.positive_strides)

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
            "CAUSAL": problem.causal,
            "SKIP_MASKED_TILES": self.skip_masked_tiles,
            "BFLOAT16": problem.dtype == "bfloat16",
            "FLOAT32": problem.dtype == "float32",
            "TF32": problem.precision == "tf32",
            **dict(config.switches),
        }


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _pitch(head_dim: int, itemsize: int, pad_to: int) -> int:
    """Bytes from row to row of a shared-memory tile: ``tile_pitch`` of ``tiles/copy.cuh``."""
    units = _ceil_div(head_dim * itemsize, pad_to) * pad_to // 16
    return (units | 1) * 16


def _fa2_shared_memory(config: TileConfig, head_dim: int) -> int:
    """Q (later O), ``num_stages`` of K and of V; P and two float32 a row where warps exchange them."""
    rows = config.block_q + 2 * config.num_stages * config.block_kv
    exchanged = _pitch(config.block_kv, itemsize=2, pad_to=32) + 8 if config.column_warps == 2 else 0
    return rows * _pitch(head_dim, itemsize=2, pad_to=32) + config.block_q * exchanged


def _fa2_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    """One block per query block and head."""
    blocks = _ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    return (Launch("fa2_forward", (blocks, 1, 1), config.num_warps * 32, shared_memory),)


def _fa2_choose(problem: Problem, fitting: tuple[TileConfig, ...]) -> TileConfig:
    """The first that fits; 64 query rows a block where 128 would leave SMs idle or rows empty.

    Measured on an H200: full attention gains until every second SM has a block of 128 rows, causal
    attention, whose blocks differ in length, until the blocks of 128 rows make one wave.
    """
    sms = 132
    blocks = _ceil_div(problem.seqlen_q, 128) * problem.heads * problem.batch
    wave = 2 * sms if problem.head_dim <= 128 else sms
    narrow = [config for config in fitting if config.block_q == 64]
    if narrow and blocks <= (wave if problem.causal else sms // 2):
        return narrow[0]
    if narrow and problem.seqlen_q <= 64:
        return narrow[-1]
    return fitting[0]


_FA2_FORWARD = KernelSpec(
    name="fa2_forward",
    algorithm="fa2",
    title="FlashAttention-2 forward, 16-bit tensor cores",
    paper="Dao 2023, FlashAttention-2, Algorithm 1",
    source="fa2_forward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        # Head dims 120 and 216 are left out: they would spill a few registers.
        TileConfig(128, 64, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=112),
        TileConfig(128, 64, num_warps=4, num_stages=2, blocks_per_sm=2, min_head_dim=128, max_head_dim=128),
        TileConfig(128, 64, num_warps=8, num_stages=2, min_head_dim=136, max_head_dim=208, column_warps=2),
        TileConfig(128, 64, num_warps=8, num_stages=2, min_head_dim=224, column_warps=2),
        # Half the rows: for few queries, and where shared memory is small (sm_86, sm_89, sm_120).
        TileConfig(128, 32, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=128),
        TileConfig(64, 64, num_warps=4, num_stages=2, blocks_per_sm=2),
        TileConfig(64, 32, num_warps=4, num_stages=2, blocks_per_sm=2),
    ),
    shared_memory=_fa2_shared_memory,
    launches=_fa2_launches,
    skip_masked_tiles=True,
    choose=_fa2_choose,
)


def _fa2_f32_shared_memory(config: TileConfig, head_dim: int) -> int:
    """Q, K and V; each row's gap has room for what the split into pairs needs."""
    return (config.block_q + 2 * config.block_kv) * _pitch(head_dim, itemsize=4, pad_to=64)


def _fa2_f32_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    """One block per query block and head."""
    blocks = _ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    return (Launch("fa2_forward_f32", (blocks, 1, 1), config.num_warps * 32, shared_memory),)


_FA2_FORWARD_F32 = KernelSpec(
    name="fa2_forward_f32",
    algorithm="fa2",
    title="FlashAttention-2 forward, float32 as pairs of float16",
    paper="Dao 2023, FlashAttention-2, Algorithm 1; Ootomo and Yokota 2022",
    source="fa2_forward_f32.cu",
    dtypes=("float32",),
    precisions=("float32", "tf32"),
    configs=(
        TileConfig(128, 32, num_warps=4, blocks_per_sm=3, max_head_dim=64),
        TileConfig(128, 32, num_warps=4, blocks_per_sm=2, max_head_dim=128),
        TileConfig(128, 32, num_warps=8, min_head_dim=136),
        TileConfig(64, 16, num_warps=4, blocks_per_sm=2, min_head_dim=136),
    ),
    shared_memory=_fa2_f32_shared_memory,
    launches=_fa2_f32_launches,
    skip_masked_tiles=True,
    # 4 to 12 bytes at head_dim 128, up to 48 at 256, of 255 registers; measured with them, on an H200, at 2.1
    # to 3.0 times PyTorch's memory-efficient backend (cufa/records).
    allowed_spill_bytes=48,
)


def _fa1_shared_memory(config: TileConfig, head_dim: int) -> int:
    """K and V, the warps' parts of P·V (over K and V where those move to registers), two query blocks,
    row maxima and sums."""
    pitch = _pitch(head_dim, itemsize=2, pad_to=32)
    key_warps = 2 if config.block_kv < 64 else 4
    keys_and_values = 2 * config.block_kv * pitch
    parts = config.num_warps * (key_warps - 1) * 2048
    in_registers = head_dim <= 64 and config.block_kv // key_warps <= 32
    first = max(keys_and_values, parts) if in_registers else keys_and_values + parts
    return first + 2 * config.block_q * pitch + 2 * config.num_warps * 32 * 4


def _fa1_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    """One block per head."""
    blocks = problem.batch * problem.heads
    return (Launch("fa1_forward", (blocks, 1, 1), config.num_warps * 32, shared_memory),)


def _fa1_workspace(problem: Problem, config: TileConfig) -> int:
    """O, l and m in float32 between key blocks, for whole query blocks and 16-column tiles."""
    rows = _ceil_div(problem.seqlen_q, config.block_q) * config.block_q
    columns = _ceil_div(problem.head_dim, 16) * 16
    return problem.batch * problem.heads * rows * (columns + 2) * 4


_FA1_FORWARD = KernelSpec(
    name="fa1_forward",
    algorithm="fa1",
    title="FlashAttention-1 forward, 16-bit tensor cores",
    paper="Dao et al. 2022, FlashAttention, Algorithm 1",
    source="fa1_forward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        # O crosses device memory once a key block, so the more keys the better: 256, as in the authors' own.
        # (Between these head dims a few registers spill.)
        TileConfig(64, 256, num_warps=8, min_head_dim=64, max_head_dim=64),
        TileConfig(64, 256, num_warps=8, min_head_dim=128, max_head_dim=128),
        TileConfig(32, 128, num_warps=4, min_head_dim=152, max_head_dim=184),
        TileConfig(32, 128, num_warps=4, min_head_dim=200),
        # The block sweep published for FlashAttention-1.
        TileConfig(128, 128, num_warps=8, max_head_dim=128),
        TileConfig(128, 128, num_warps=4, max_head_dim=128),
        TileConfig(64, 128, num_warps=4, max_head_dim=128),
        TileConfig(64, 64, num_warps=4),
        TileConfig(128, 64, num_warps=4, max_head_dim=128),
        TileConfig(128, 64, num_warps=8, max_head_dim=128),
        # Wide heads where shared memory is short.
        TileConfig(64, 32, num_warps=4, min_head_dim=136),
        TileConfig(32, 32, num_warps=2, min_head_dim=136),
    ),
    shared_memory=_fa1_shared_memory,
    launches=_fa1_launches,
    workspace=_fa1_workspace,
)


def _naive_shared_memory(config: TileConfig, head_dim: int) -> int:
    """A tile of each factor, 128 bytes of the inner dimension a row."""
    return (config.block_q + config.block_kv) * _pitch(64, itemsize=2, pad_to=16)


def _naive_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    heads = problem.batch * problem.heads
    row_blocks = heads * _ceil_div(problem.seqlen_q, config.block_q)
    threads = config.num_warps * 32
    score_tiles = row_blocks * _ceil_div(problem.seqlen_k, config.block_kv)
    softmax_blocks = _ceil_div(heads * problem.seqlen_q, config.num_warps)
    output_tiles = row_blocks * _ceil_div(problem.head_dim, config.block_kv)
    return (
        Launch("naive_scores", (score_tiles, 1, 1), threads, shared_memory),
        Launch("naive_softmax", (softmax_blocks, 1, 1), threads, 0),
        Launch("naive_values", (output_tiles, 1, 1), threads, shared_memory),
    )


def _naive_workspace(problem: Problem, config: TileConfig) -> int:
    """Scores in float32, probabilities in the inputs' dtype."""
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    return scores * (4 + problem.itemsize)


_NAIVE = KernelSpec(
    name="naive",
    algorithm="naive",
    title="Three passes with the score matrix in device memory",
    paper="Vaswani et al. 2017, Attention Is All You Need, section 3.2.1",
    source="naive.cu",
    dtypes=("float16", "bfloat16", "float32"),
    precisions=("native", "float32", "tf32"),
    configs=(TileConfig(64, 64, num_warps=4, blocks_per_sm=4),),
    shared_memory=_naive_shared_memory,
    launches=_naive_launches,
    workspace=_naive_workspace,
)


def _fa3_shared_memory(config: TileConfig, head_dim: int) -> int:
    """Q of each consumer warpgroup, the K and V rings, a full and an empty barrier for each buffer."""
    row = _ceil_div(head_dim, 64) * 128
    consumers, q_stages = config.num_warps // 4 - 1, dict(config.switches)["Q_STAGES"]
    buffers = q_stages * consumers + 2 * config.num_stages
    return (q_stages * config.block_q + 2 * config.num_stages * config.block_kv) * row + buffers * 16


def _fa3_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    """Persistent blocks that share out query blocks and heads."""
    items = _ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    return (Launch("fa3_forward", (items, 1, 1), config.num_warps * 32, shared_memory, persistent=True),)


def _fa3_config(
    block_q: int, block_kv: int, num_stages: int, *, q_stages: int, min_head_dim: int, max_head_dim: int
) -> TileConfig:
    """A producer and block_q / 64 consumer warpgroups. One Q buffer goes with Q kept in registers, or with
    tiles that leave no room for two."""
    in_registers = q_stages == 1 and max_head_dim <= 128
    return TileConfig(
        block_q,
        block_kv,
        num_warps=4 * (block_q // 64 + 1),
        num_stages=num_stages,
        min_head_dim=min_head_dim,
        max_head_dim=max_head_dim,
        switches=(("Q_STAGES", q_stages), ("Q_IN_REGISTERS", in_registers), ("PING_PONG", True)),
    )


_FA3_WIDE = _fa3_config(192, 128, 2, q_stages=2, min_head_dim=8, max_head_dim=64)
_FA3_SQUARE = _fa3_config(128, 128, 3, q_stages=1, min_head_dim=8, max_head_dim=128)
_FA3_LONG = _fa3_config(192, 80, 2, q_stages=2, min_head_dim=72, max_head_dim=128)
_FA3_DEEP = _fa3_config(128, 80, 2, q_stages=1, min_head_dim=136, max_head_dim=256)


def _fa3_stalls(problem: Problem, config: TileConfig, num_sms: int) -> bool:
    """A block's second item whose last warpgroup lies past the end, with one key tile more than there are
    buffers: that warpgroup skips all tiles but one and holds back a V buffer that the others, whose turn
    comes first, wait for. Found by executing the kernel on a CPU."""
    groups = _ceil_div(problem.seqlen_q, 64)
    items = _ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    key_tiles = _ceil_div(problem.seqlen_k, config.block_kv)
    past_the_end = groups % (config.block_q // 64) != 0
    return past_the_end and items > num_sms and key_tiles == config.num_stages + 1


def _choose_fa3(problem: Problem, fitting: tuple[TileConfig, ...]) -> TileConfig:
    """Measured on an H200 (records): long causal sequences gain from wide query blocks, which skip by the
    warpgroup."""
    if problem.causal and problem.seqlen_k >= 8192 and _FA3_LONG in fitting:
        return _FA3_LONG
    return fitting[0]


_FA3_FORWARD = KernelSpec(
    name="fa3_forward",
    algorithm="fa3",
    title="FlashAttention-3 forward: TMA, WGMMA, warp specialisation",
    paper="Shah et al. 2024, FlashAttention-3, Algorithms 1 and 2",
    source="fa3_forward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(_FA3_WIDE, _FA3_SQUARE, _FA3_LONG, _FA3_DEEP),
    shared_memory=_fa3_shared_memory,
    launches=_fa3_launches,
    skip_masked_tiles=True,
    min_capability=90,
    max_capability=90,
    tensor_map_rows=lambda config: (64, config.block_kv, config.block_kv),
    choose=_choose_fa3,
    stalls=_fa3_stalls,
)


KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        _FA3_FORWARD,
        _FA2_FORWARD,
        # The ablation: the same source, wholly masked tiles computed and thrown away by the mask.
        dataclasses.replace(
            _FA2_FORWARD,
            name="fa2_noskip",
            algorithm="fa2_noskip",
            title="FlashAttention-2 forward without causal skipping",
            skip_masked_tiles=False,
        ),
        _FA2_FORWARD_F32,
        dataclasses.replace(
            _FA2_FORWARD_F32,
            name="fa2_noskip_f32",
            algorithm="fa2_noskip",
            title="FlashAttention-2 forward without causal skipping, float32 as pairs of float16",
            skip_masked_tiles=False,
        ),
        _FA1_FORWARD,
        _NAIVE,
    )
}
"""In order of preference: ``algorithm="auto"`` takes the first that serves the problem."""
