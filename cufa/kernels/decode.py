"""decode_split and decode_balanced: Flash-Decoding with fixed splits, and with shares of all tiles. Measurements:
cuda_src/decode/NOTES.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from ..gpu.architectures import Device
from ..problem.float8 import MODES, key_tile
from ..problem.problem import BAND_KINDS, Problem
from ..problem.tree import TREE_KINDS
from .base import Kernel
from .config import Box, Buffer, Launch, Split, TileConfig, ceil_div, tile_pitch

#: Most blocks of a cluster that every GPU with clusters allows.
MAX_CLUSTER = 8

#: Keys in one box of the copy engine.
_BOX_KEYS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(TileConfig):
    """Tiles of Flash-Decoding: ``block_q`` packed query rows, ``block_kv`` keys of all rings together."""

    row_warps: int
    """Warps that share a ring and its keys, and split the rows."""
    fold_combine: bool
    """The last warp that stores its rows of a work item merges them; else a second launch or a cluster does."""
    cluster_merge: bool
    """The splits of a work item are one cluster, which merges them in its shared memory."""
    tma_copies: bool
    """The cache is read by the copy engine."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Measurements may name two modes that kernels no longer have: off, the config is the same."""
        content = dict(content)
        if content.pop("whole_rows", False) or content.pop("l2_promotion", 0):
            raise TypeError("decode kernels have no boxes of whole rows and no L2 promotion")
        return super().from_json(content)

    @property
    def rings(self) -> int:
        return self.num_warps // self.row_warps

    def merged_in_cluster(self) -> DecodeConfig:
        """This config with the splits of a work item as one cluster."""
        return dataclasses.replace(self, fold_combine=False, cluster_merge=True)


def row_blocks(problem: Problem, config: TileConfig) -> int:
    """Thread blocks that the packed query rows of one key/value head take."""
    return ceil_div(problem.rows, config.block_q)


def items(problem: Problem, config: TileConfig) -> int:
    """Work items: blocks of query rows of each key/value head of each sequence."""
    return problem.batch * problem.kv_heads * row_blocks(problem, config)


def _combine_launches(entry: str, problem: Problem, config: DecodeConfig) -> tuple[Launch, ...]:
    """A thread for each four columns of a row; no launch if the last warp or a cluster merges."""
    if config.fold_combine or config.cluster_merge:
        return ()
    threads, vectors = config.num_warps * 32, min(config.block_q, problem.rows) * problem.v_dim // 4
    grid = (ceil_div(vectors, threads), problem.kv_heads * row_blocks(problem, config), problem.batch)
    return (Launch(entry, grid, threads, 0, dependent=config.tma_copies),)


def _append_launches(problem: Problem) -> tuple[Launch, ...]:
    """A warp for the keys and a warp for the values of each new token that must be quantised."""
    if not problem.cache.quantize_new:
        return ()
    return (Launch("decode_append", (problem.cache.new_tokens, problem.kv_heads, problem.batch), 64, 0),)


def _decode_config(
    rows: int, keys: int, num_warps: int, num_stages: int, *, row_warps: int = 1, blocks_per_sm: int = 1,
    min_head_dim: int = 8, max_head_dim: int = 256, fold: bool = True, tma: bool = False,
) -> DecodeConfig:  # fmt: skip
    """``rows`` packed query rows, ``keys`` of one ring in a stage."""
    return DecodeConfig(
        rows, keys * num_warps // row_warps, num_warps, num_stages, blocks_per_sm,
        min_head_dim=min_head_dim, max_head_dim=max_head_dim, row_warps=row_warps, fold_combine=fold,
        cluster_merge=False, tma_copies=tma,
    )  # fmt: skip


#: Caches up to this long are read by blocks of four warps, whose launch and merge cost less.
_SHORT = 2048

#: Eight warps with two stages keep 131 KB per SM in flight, three stages 197 KB: two are faster if memory is slow. A
#: stage has the same size for all head dims from 72 to 128, because boxes hold 128 bytes of a row. Other stages keep
#: three.
TWO_STAGES = _decode_config(16, 16, 8, 2, min_head_dim=72, max_head_dim=128, tma=True)


#: By the number of blocks of 16 rows that share a key/value head: the most bytes that all blocks but the first read.
#: Each block reads the keys once, the first from memory and the others from L2. Up to this limit, this is faster than
#: one block with taller tiles.
_READ_AGAIN = {2: 160 << 20} | dict.fromkeys(range(3, 9), 64 << 20)

#: For e4m3 caches only: 16-bit ones are read faster in tiles of 16 or 64 rows.
_HALF_TALL = _decode_config(32, 16, 4, 3, row_warps=2, blocks_per_sm=2, max_head_dim=128, tma=True)

#: More rows than one warp takes, on 8 warps.
_TALL = _decode_config(64, 32, 8, 2, row_warps=4, fold=False)


def _cp_async_configs() -> tuple[DecodeConfig, ...]:
    """One ring per warp of 16 rows; with more rows, several warps share a ring."""
    return (
        _decode_config(16, 16, 8, 3, max_head_dim=128),
        _decode_config(16, 16, 4, 3, blocks_per_sm=2, max_head_dim=128),
        _decode_config(16, 16, 4, 3, min_head_dim=136),
        _decode_config(16, 16, 4, 2),
        _decode_config(32, 16, 4, 3, row_warps=2, blocks_per_sm=2, max_head_dim=128),
        _TALL,
        # Small shared memory (sm_86, sm_89, sm_120).
        _decode_config(16, 16, 2, 2, min_head_dim=136),
        _decode_config(64, 16, 4, 2, row_warps=4, fold=False),
    )


def _box_configs() -> tuple[DecodeConfig, ...]:
    """As with cp.async, except that two warps share 64 rows, half each: half the reads of shared memory."""
    return (
        _decode_config(16, 16, 8, 3, max_head_dim=128, tma=True),
        _decode_config(16, 16, 4, 3, blocks_per_sm=2, max_head_dim=128, tma=True),
        _decode_config(16, 16, 4, 3, min_head_dim=136, tma=True),
        _HALF_TALL,
        _decode_config(64, 16, 8, 3, row_warps=2, max_head_dim=128, fold=False, tma=True),
        _decode_config(64, 16, 8, 3, row_warps=4, min_head_dim=136, fold=False, tma=True),
        TWO_STAGES,  # last: planned only if memory is slow, or several blocks read the same keys
    )


def _configs(tma: bool, fp8: bool, balanced: bool) -> tuple[DecodeConfig, ...]:
    """Fixed splits may be merged in Hopper's clusters. Stages of an e4m3 cache are half as large: always three.
    Shares of wide e4m3 heads need more registers than tall tiles leave a thread: they have 4 warps."""
    configs = _box_configs() if tma else _cp_async_configs()
    configs = tuple(config for config in configs if config != (TWO_STAGES if fp8 else _HALF_TALL))
    if tma and not balanced:
        configs += tuple(config.merged_in_cluster() for config in configs)
    if fp8 and balanced and not tma:
        return tuple(dataclasses.replace(x, max_head_dim=192) if x == _TALL else x for x in configs)
    return configs


class DecodeSplit(Kernel):
    """Every sequence is cut into the same number of splits. ``tma``: the cache is read by Hopper's copy engine, in
    aligned rows and pages of whole boxes. ``fp8``: a cache of e4m3, whose conversions are instructions of sm_89 and
    later; ``scaled``: its tokens, or blocks of tokens, have scales of their own."""

    name = "decode_split"
    algorithm = "fixed"
    title = "Flash-Decoding with fixed splits"
    paper = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding for long-context inference"
    source = "decode/split.cu"
    entry = "decode_split"
    operation = "decode"
    dtypes = ("float16", "bfloat16")
    masks = (*BAND_KINDS, "sets", "columns")
    chunks_only = True
    options: tuple[str, ...] = ("alibi", "sink", "score", "invariant", "tree")
    options_with_irregular_masks: tuple[str, ...] = options[:4]

    def __init__(self, *, tma: bool = False, fp8: bool = False, scaled: bool = False) -> None:
        self.configs: tuple[DecodeConfig, ...] = _configs(tma, fp8, balanced=self.algorithm == "balanced")
        if tma:
            self.name += "_tma"
            self.title += ", by the copy engine"
            self.min_capability = self.max_capability = 90
            self.page_multiple = _BOX_KEYS
        self.any_v_dim = not fp8
        if fp8:
            self.name += "_fp8"
            self.title += ", e4m3 cache"
            self.k_dtypes = ("float8_e4m3",)
            self.min_capability = max(self.min_capability, 89)
            self.head_dim_multiple = 16
        if scaled:
            self.name += "_scaled"
            self.title += " with scales of tokens or blocks"
            self.source = self.source.replace(".cu", "_scaled.cu")
            self.scales = {"q": ("",), "k": MODES[2:], "v": MODES[2:]}

    def shared_memory(self, config: DecodeConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q; the rings of keys and values, where warps later merge their O in float32; m and l of each ring and row;
        the state of each warp's share; a barrier for each buffer of a ring; for a cluster's merge, the received
        vectors of O, m and l of each row, and a barrier."""
        itemsize, v_dim = 1 if self.k_dtypes else 2, v_dim or head_dim
        widest = max(head_dim, v_dim)
        if config.tma_copies:
            pitch, align = ceil_div(widest * itemsize, 128) * 128, 1024  # the swizzle's span
        else:
            pitch, align = tile_pitch(widest, itemsize=itemsize, pad_to=16 * itemsize), 16
        rows, rings = config.block_q, config.rings
        received = (rows * v_dim // 4 + MAX_CLUSTER) * 16, rows * MAX_CLUSTER * 8, 16
        vectors, ml, barrier = received if config.cluster_merge else (0, 0, 0)
        scales = config.num_stages * 2 * config.block_kv * 4 if self.scales else 0
        return (
            Buffer("Q", rows * tile_pitch(head_dim, itemsize=2, pad_to=32)),
            Buffer("RINGS", config.num_stages * 2 * config.block_kv * pitch, align=align),
            Buffer("MERGED", rings * rows * (ceil_div(v_dim, 32) * 32 + 8) * 4, over="RINGS"),
            Buffer("ML", rings * rows * 8),
            Buffer("SHARES", config.num_warps * 32),
            Buffer("BARRIERS", rings * config.num_stages * 8),
            Buffer("RECEIVED", vectors),
            Buffer("RECEIVED_ML", ml),
            Buffer("RECEIVED_BARRIER", barrier),
            Buffer("SCALES", scales),
        )

    def launches(
        self, problem: Problem, config: DecodeConfig, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per split, and the launch that merges, if there is one."""
        num_splits = split.count if split else 2  # builds do not depend on it
        heads = problem.kv_heads * row_blocks(problem, config)
        grid = (heads, num_splits, problem.batch) if problem.invariant else (num_splits, heads, problem.batch)
        cluster = num_splits if config.cluster_merge else 1
        first = Launch("decode_split", grid, config.num_warps * 32, shared_memory, cluster=cluster)
        combine = _combine_launches("decode_combine", problem, config) if num_splits > 1 else ()
        return *_append_launches(problem), first, *combine

    def workspace(self, problem: Problem, config: DecodeConfig, split: Split | None = None) -> int:
        num_splits = split.count if split else 2
        if num_splits == 1 or config.cluster_merge:
            return 0
        slots, slot = items(problem, config) * num_splits, config.slot_bytes(problem.v_dim)
        if problem.invariant:  # without padding rows
            return slots * slot // config.block_q * min(config.block_q, problem.rows)
        return slots * slot

    def counters(self, problem: Problem, config: DecodeConfig, workspace: int) -> int:
        """One per warp of a work item: the last warp to count merges."""
        return items(problem, config) * config.num_warps if workspace else 0

    def boxes(self, config: DecodeConfig) -> dict[str, Box]:
        if not config.tma_copies:
            return {}
        box = Box(_BOX_KEYS, promotion=0)  # long caches are faster without
        return {"k_cache": box, "v_cache": box}

    def choose(self, problem: Problem, fitting: tuple[DecodeConfig, ...], device: Device) -> DecodeConfig:
        """The first that holds all packed rows, else the first of the tallest. If several blocks read the keys of a
        head (``_READ_AGAIN``): tiles of 16 rows, with two stages if there are such tiles. Four warps for short or
        ragged caches: of several blocks per SM, one works while another begins or ends. Two stages if memory is slow;
        with more work items than SMs, caches of 1,024 tokens are then not short.
        """
        fitting = tuple(
            config for config in fitting if not config.cluster_merge
        )  # the planner decides on clusters
        if problem.invariant:
            fitting = self._alike(fitting)
        if self._read_again(problem):
            short_tiles = [config for config in fitting if config.block_q == 16]
            return TWO_STAGES if TWO_STAGES in short_tiles else short_tiles[0]
        most = max(config.block_q for config in fitting)
        tall = min((c.block_q for c in fitting if c.block_q >= problem.rows), default=most)
        holding = [config for config in fitting if config.block_q == tall]
        two_stages = device.slow_memory and TWO_STAGES in holding
        short = _SHORT // 4 if two_stages and items(problem, TWO_STAGES) > device.num_sms else _SHORT
        if problem.invariant:
            return holding[0]
        if problem.visible_capacity <= short or (problem.lengths.ragged and problem.batch > 1):
            return min(holding, key=lambda config: config.num_warps)
        return TWO_STAGES if two_stages else holding[0]

    @staticmethod
    def _read_again(problem: Problem) -> bool:
        """Whether several blocks of 16 rows read the keys of one head: the conditions at ``_READ_AGAIN``."""
        readers = ceil_div(problem.rows, 16)
        alike = not problem.invariant and (problem.batch == 1 or not problem.lengths.ragged)
        most = _READ_AGAIN.get(readers, 0) if alike and problem.head_dim <= 128 else 0
        return problem.kv_bytes() * (readers - 1) <= most and readers > 1

    @staticmethod
    def _alike(fitting: tuple[DecodeConfig, ...]) -> tuple[DecodeConfig, ...]:
        """Invariant: configs with equal rings and equal keys in a tile, so that a row has the same bits in all. Four
        rings of 16 keys if a config has them, because tall tiles have them too."""
        short = min((x for x in fitting if x.block_q == 16), key=lambda x: abs(x.rings - 4))
        keys = short.rings, short.block_kv
        return tuple(x for x in fitting if (x.rings, x.block_kv) == keys)

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        """Choices of decoding alone."""
        fixed = {"": 0, "bound": 1}.get(str(problem.softmax_max), 2)
        return {
            "SOFTMAX_MAX": fixed,
            "INVARIANT": problem.invariant,  # every kernel has it; only here builds pair it with other choices
            "TREE": TREE_KINDS.index(problem.tree),
            "PAGED": problem.cache.paged,
            "RAGGED": problem.lengths.ragged,
            "EXEMPT_BY_SEQUENCE": problem.exempt_by_sequence,
            "APPEND": problem.cache.new_tokens > 0 and not problem.cache.quantize_new,
            "QUANTIZE_NEW": problem.cache.quantize_new,
            "FP8_CACHE": problem.k_element.name == "float8_e4m3",
            "KEY_SCALES": MODES.index(problem.scales[1]) - 1 if problem.scales else 0,
            "SCALE_BLOCK": key_tile(problem.head_dim),
        }


class DecodeBalanced(DecodeSplit):
    """The tiles of the whole batch are cut into equal shares."""

    name = "decode_balanced"
    algorithm = "balanced"
    options = ("alibi", "sink", "score", "tree")
    options_with_irregular_masks = options[:3]
    title = "Flash-Decoding with shares of a whole ragged batch"
    paper = "Sanovar et al. 2024, LeanAttention; Osama et al. 2023, Stream-K"
    source = "decode/balanced.cu"
    entry = "decode_balanced"

    def launches(
        self, problem: Problem, config: DecodeConfig, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per share, and the launch that merges, if there is one."""
        shares = Launch(
            "decode_balanced", (split.count if split else 2, 1, 1), config.num_warps * 32, shared_memory
        )
        combine = _combine_launches("decode_combine_balanced", problem, config)
        return *_append_launches(problem), shares, *combine

    def workspace(self, problem: Problem, config: DecodeConfig, split: Split | None = None) -> int:
        """A share leaves at most two partial results, at its ends."""
        return (split.count if split else 2) * 2 * config.slot_bytes(problem.v_dim)


#: In order of preference: boxes are 3 to 5% faster than cp.async on long caches (H200).
DECODE = tuple(
    kind(tma=tma, fp8=fp8, scaled=scaled)
    for fp8 in (False, True)
    for tma in (True, False)
    for scaled in ((False, True) if fp8 else (False,))
    for kind in (DecodeSplit, DecodeBalanced)
)
