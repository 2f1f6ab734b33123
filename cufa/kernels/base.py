"""class Kernel: what a kernel serves, its tile configs, launches and workspace. Nothing here needs a GPU or CuPy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ..gpu.architectures import Device
from ..problem.lengths import LENGTH_KINDS
from ..problem.problem import BAND_KINDS, MASK_KINDS, Problem
from ..problem.tree import TREE_KINDS
from ..schedule.order import Order
from ..schedule.schedule import Schedule
from .config import Box, Buffer, Launch, Split, SplitConfig, TileConfig, bytes_of, ceil_div
from .support import refusal

Config = Any
"""A config of the kernel's own class: that of :attr:`Kernel.configs`."""


class Kernel:
    """One kernel: its declarations, and its launches for a :class:`~cufa.problem.problem.Problem`.

    Every kernel is a subclass, in the file with the stem of its folder in ``cuda_src``; the registry
    (:data:`cufa.kernels.KERNELS`) holds one instance of each.
    """

    name: str
    algorithm: str
    """Its name in the public call's ``algorithm=`` or ``schedule=``. Kernels with disjoint dtypes may share it."""
    title: str
    paper: str
    source: str
    """File under ``cuda_src``, of the first config: see :meth:`source_of`."""
    entry: str
    """extern "C" name of the launch that computes tiles: traces, profiles and occupancy refer to it."""
    operation: str = "forward"
    """A name of :data:`cufa.plan.operation.OPERATIONS`."""

    # What the kernel serves.
    dtypes: tuple[str, ...]
    """Elements of q."""
    k_dtypes: tuple[str, ...] = ()
    """Elements of k and v; empty: as q."""
    out_dtypes: tuple[str, ...] = ()
    """Elements of the result; empty: as q."""
    scales: Mapping[str, tuple[str, ...]] = {}
    """Inputs of e4m3: the modes of scales for "q", "k" and "v", of :data:`cufa.problem.float8.MODES`."""
    precisions: tuple[str, ...] = ("native",)
    masks: tuple[str, ...] = BAND_KINDS
    """The kinds of masks, of :data:`~cufa.problem.problem.MASK_KINDS`."""
    options: tuple[str, ...] = ()
    """Some of "padded", "packed" (lengths), "cache", "tree", "invariant", "alibi", "sink", "deterministic", "running",
    "score" and "gradients" (of its arrays), "dropout", "float32 gradients". Every kernel takes a soft cap."""
    options_with_irregular_masks: tuple[str, ...] = ()
    """The options that also go with irregular masks."""
    folds_score_scale: bool = False
    """Constants that a score is multiplied by are kept in registers, with the softmax scale as a factor."""
    score_derivatives_without_score: bool = False
    """Backward: when gradients of a score function's arrays are added, the score is no longer known."""
    chunks_only: bool = False
    """Of the masks that hide each key from one run of rows, the kernel serves chunks only."""
    head_dim_multiple: int = 8
    any_v_dim: bool = False
    """v and out may have another head dim than q and k."""
    aligned_rows: bool = False
    """Rows begin at multiples of 16 bytes, as with the copy engine."""
    page_multiple: int = 1
    """Caches: the number of keys in a page is a multiple of this."""
    min_capability: int = 80
    max_capability: int = 999
    """Hopper's own instructions (sm_90a) exist on no other architecture."""
    skip_masked_tiles: bool = False
    ablation: bool = False
    """A kernel for comparisons: tables of support omit it."""

    # Tiles.
    configs: tuple[TileConfig, ...]
    """Configs of one class, in order of preference. ``cufa compile`` builds and ``cufa tune`` tries all of them."""
    v_configs: tuple[TileConfig, ...] = ()
    """More tiles, for v of another head dim than q and k."""
    split_configs: tuple[TileConfig, ...] = ()
    """Forward: tiles whose keys are split over thread blocks, for queries too few to fill a GPU
    (:mod:`cufa.plan.splits`). Empty: the kernel does not split keys."""
    workspace_holds: str = ""
    """Contents of the workspace, for printed plans."""
    reads_block_order: bool = False
    """Persistent blocks take query blocks in an order that the host provides if tiles are listed."""

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or unpickled kernel is the registry's instance."""
        return _registered, (self.name,)

    def source_of(self, config: Config) -> str:
        """File under ``cuda_src`` that a config is compiled from."""
        return self.source

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.source_of(x) for x in self.configs + self.split_configs))

    def shared_memory(self, config: Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """The buffers of dynamic shared memory, in order. ``v_dim``: head dim of v and out; 0: ``head_dim``."""
        raise NotImplementedError

    def launches(
        self, problem: Problem, config: Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """In order; ``shared_memory`` is :meth:`shared_bytes`."""
        raise NotImplementedError

    def workspace(self, problem: Problem, config: Config, split: Split | None = None) -> int:
        """Device memory in bytes beyond inputs and outputs."""
        return 0

    def counters(self, problem: Problem, config: Config, workspace: int) -> int:
        """32-bit words that are zero between launches. If there are any, the workspace outlives the call."""
        return 0

    def boxes(self, config: Config) -> Mapping[str, Box]:
        """The box of each operand that the kernel reads or writes by tensor map. If there is any, the copy engine (TMA)
        requires 16-byte aligned rows and positive strides."""
        return {}

    def maps_of_workspace(self, problem: Problem) -> Mapping[str, tuple[int, ...]]:
        """Operands whose tensor map describes an array at the begin of the workspace, with the array's shape."""
        return {}

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        """Choices that a printed plan explains."""
        return ()

    def over_cache(self, config: Config, problem: Problem) -> Config:
        """The config for keys that are in a cache; ``config`` for other problems."""
        return config

    def flops(self, config: Config) -> float:
        """FLOP/s on one SM of an H200, for the estimate of :mod:`cufa.plan.splits`."""
        return 0.0

    def tile_latency(self, config: Config, head_dim: int) -> float:
        """The least seconds of a tile, for a thread block alone on its SM."""
        return 0.0

    def choose(self, problem: Problem, fitting: tuple[Config, ...], device: Device) -> Config:
        """The config of ``fitting`` to use for a shape that `cufa tune` has not measured."""
        return fitting[0]

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Config) -> Order | None:
        """Which block takes which work item, in order; None: the order is not modelled."""
        return None

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        """Choices that only this kernel's config.cuh declares."""
        return {}

    def most_listed_queries(self, head_dim: int) -> int | None:
        """Most queries with an irregular mask; None: any number."""
        return None

    @property
    def uses_copy_engine(self) -> bool:
        return bool(self.boxes(self.configs[0]))

    def shared_bytes(self, config: TileConfig, head_dim: int, v_dim: int = 0) -> int:
        """Dynamic shared memory of a thread block."""
        return _shared_bytes(self, config, head_dim, v_dim or head_dim)

    def fitting(
        self, configs: tuple[TileConfig, ...], head_dim: int, device: Device, v_dim: int = 0
    ) -> tuple[TileConfig, ...]:
        """The configs that run on the device: architecture, head dims and shared memory within limits."""
        if not self.runs_on(device.arch.capability):
            return ()
        limit = device.arch.shared_memory_per_block
        return tuple(
            c for c in configs if c.fits(head_dim, v_dim) and self.shared_bytes(c, head_dim, v_dim) <= limit
        )

    @property
    def config_class(self) -> type[TileConfig]:
        return type(self.configs[0])

    def read_config(self, content: Mapping[str, Any]) -> TileConfig:
        """A config of this kernel from JSON, or of the CPU path (0 warps). Raises TypeError for unknown fields."""
        return (self.config_class if content.get("num_warps") else TileConfig).from_json(content)

    def runs_on(self, capability: int) -> bool:
        return self.min_capability <= capability <= self.max_capability

    def refuses(self, problem: Problem, capability: int | None = None) -> str | None:
        """Why the kernel does not serve a problem (on a GPU of this capability), or None if it does:
        :func:`cufa.kernels.support.refusal`."""
        return refusal(self, problem, capability)

    def constants(self, problem: Problem, config: TileConfig) -> dict[str, int | bool]:
        """Values of the choices that the kernel's config.cuh declares."""
        return {
            "HEAD_DIM": problem.head_dim,
            "V_DIM": problem.v_dim,
            **_tile_constants(self, config, problem.head_dim, problem.v_dim),
            "ALIGNMENT": problem.alignment,
            "MASK": MASK_KINDS.index(problem.mask_kind),
            "SCORE": problem.score is not None,
            "DROPOUT": problem.dropped > 0,
            "SOFTCAP": problem.softcap is not None,
            "LENGTHS": LENGTH_KINDS.index(problem.lengths.compiled_kind),
            "ALIBI": problem.alibi,
            "SINK": problem.sink,
            "TREE": TREE_KINDS.index(problem.tree),
            "INVARIANT": problem.invariant,
            "SKIP_MASKED_TILES": self.skip_masked_tiles,
            "BFLOAT16": problem.dtype == "bfloat16",
            "FLOAT32": problem.dtype == "float32",
            "TF32": problem.precision == "tf32",
            **self.own_constants(problem),
        }


def _registered(name: str) -> Kernel:
    from . import KERNELS

    return KERNELS[name]


class ForwardKernel(Kernel):
    """A forward kernel that can split the keys of a query block (:class:`~cufa.kernels.config.SplitConfig`)."""

    workspace_holds = "of each split of a query block O, and m and l of its rows, in float32"

    def with_other_launches(
        self, problem: Problem, config: SplitConfig, launch: Launch, split: Split | None, merge: str,
        dependent: bool = False,
    ) -> tuple[Launch, ...]:  # fmt: skip
        """``launch``, whose grid is the query blocks, after the pass over the mask. If keys are split: one block per
        split, then the launch ``merge``, with a thread for each four columns of a row."""
        before = *append_launches(problem), *mask_launches(problem, config)
        if not config.split_keys:
            return (*before, launch)
        count = split.count if split else 2  # None: `cufa compile`, whose builds do not depend on it
        vectors = math.prod(problem.shapes[3]) // 4
        return (
            *before,
            dataclasses.replace(launch, grid=(launch.grid[0], count, 1), persistent=False),
            Launch(
                merge, (ceil_div(vectors, _COMBINE_THREADS), 1, 1), _COMBINE_THREADS, 0, dependent=dependent
            ),
        )

    def workspace(self, problem: Problem, config: SplitConfig, split: Split | None = None) -> int:
        """A partial result for every split of every query block."""
        if not config.split_keys:
            return 0
        count = split.count if split else 2
        return config.query_items(problem) * count * config.slot_bytes(problem.v_dim)


_APPEND_TOKENS = 8  # APPEND_TOKENS of cuda_src/forward/append.cuh


def append_launches(problem: Problem) -> tuple[Launch, ...]:
    """The launch before a forward kernel that appends new tokens to the cache: a warp for each token and head."""
    if not (problem.lengths.in_cache and problem.cache.new_tokens):
        return ()
    blocks = problem.query_blocks(_APPEND_TOKENS)
    return (Launch("append", (blocks, problem.kv_heads, 1), _APPEND_TOKENS * 32, 0),)


_COMBINE_THREADS = 256  # COMBINE_THREADS of cuda_src/forward/splits.cuh
_MASK_THREADS, _MOST_MASK_BLOCKS = 128, 1 << 12  # MASK_THREADS; beyond, warps take several key blocks


def mask_launches(problem: Problem, config: TileConfig) -> tuple[Launch, ...]:
    """The pass before a forward kernel that classifies tiles in advance (``prepare_mask`` of
    cuda_src/shared/irregular_mask.cuh). Empty for masks that need none."""
    warps = problem.kernel_mask.classes_in_advance(
        problem.seqlen_q, problem.seqlen_k, config.block_q, config.block_kv
    )
    if not warps:
        return ()
    blocks = min(ceil_div(warps, _MASK_THREADS // 32), _MOST_MASK_BLOCKS)
    return (Launch("mask_blocks", (blocks, 1, 1), _MASK_THREADS, 0),)


@functools.lru_cache(4096)  # `cufa compile` chooses among hundreds of thousands of builds
def _tile_constants(kernel: Kernel, config: Config, head_dim: int, v_dim: int) -> Mapping[str, int | bool]:
    return {
        **config.constants(head_dim, v_dim),
        "SMEM_BYTES": kernel.shared_bytes(config, head_dim, v_dim),
    }


@functools.lru_cache(4096)  # every plan asks for the bytes of every config
def _shared_bytes(kernel: Kernel, config: Config, head_dim: int, v_dim: int) -> int:
    return bytes_of(kernel.shared_memory(config, head_dim, v_dim))
