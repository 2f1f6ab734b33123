"""How a decode problem is cut for a GPU: fixed splits or shares, how many, and where partial results are merged.

More splits fill the GPU better, but each partial result must be merged. Measurements: cuda_src/decode/NOTES.md.
"""

from __future__ import annotations

import dataclasses
import math

from ..gpu.architectures import Device
from ..kernels import TileConfig
from ..kernels.decode import MAX_CLUSTER, TWO_STAGES, items, row_blocks
from ..problem.problem import Problem
from ..schedule.decode import WAVES, most_tiles, num_tiles
from ..schedule.schedule import used_of

#: Fixed splits are used only if they fill at least this fraction of one wave.
FULL_WAVE = 0.9

#: On slow memory, a block reads a whole work item if work items fill their waves to at least this fraction, and each
#: has at most this many bytes. A fast SM then takes more work items, whereas equal shares wait for the slowest SM.
_FULL_WAVES = 0.95
_ITEM_BYTES = 4 << 20

#: Cost of one more partial result in the merge, as the bytes of keys and values that a block of 16 rows reads in this
#: time. A block of 64 rows reads a quarter as fast; its merge takes no longer, because many blocks share it. Blocks of
#: 16 rows that share a key/value head read from L2, 1.5 times as fast.
_MERGE_BYTES = 20_000

#: Up to this size of the cache, in bytes per block of a cluster, a merge in clusters on half of the SMs is faster than
#: a merge through global memory on all SMs.
_CLUSTER_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one problem is cut: the part of a :class:`~cufa.plan.operation.Choice` that follows from the splits."""

    schedule: str
    """"fixed" or "balanced": the algorithm of the kernel."""
    num_splits: int
    """Splits of each sequence, or shares."""
    reasons: tuple[str, ...]
    in_cluster: bool = False
    """The splits of a work item are one thread block cluster."""


def choose_cut(
    problem: Problem, device: Device, config: TileConfig, schedule: str = "auto",
    num_splits: int | None = None, clusters: bool = False,
) -> Cut:  # fmt: skip
    """Decide the cut. ``schedule`` and ``num_splits``: the caller's. ``clusters``: the kernel can merge in clusters."""
    if num_splits is not None:
        schedule = "fixed" if schedule == "auto" else schedule
        fits = schedule == "fixed" and clusters and cluster_fits(problem, device, config, num_splits)
        return Cut(schedule, num_splits, (), in_cluster=fits)
    shares = _shares(problem, device, config)
    if schedule == "balanced":
        return shares
    may_be_shares = schedule == "auto"
    if schedule == "auto" and problem.uneven and problem.batch > 1:
        may_be_shares = _tiles(problem, config) >= WAVES * resident(device, config)
        if may_be_shares:
            reason = "sequences may differ in length: shares of all tiles"
            return dataclasses.replace(shares, reasons=(reason, *shares.reasons))
    merged = (
        _in_cluster(problem, device, config) or _many_in_clusters(problem, device, config)
        if clusters
        else None
    )
    if merged is not None:
        return merged
    return _through_memory(problem, device, config, shares, must_be_fixed=not may_be_shares)


def cluster_fits(problem: Problem, device: Device, config: TileConfig, splits: int) -> bool:
    """Whether all clusters of ``splits`` blocks are resident at once. Clusters of two may use the whole GPU. A larger
    cluster must lie within one GPC, and GPCs differ in size: larger clusters may use half of the GPU."""
    blocks = resident(device, config)
    room = blocks if splits == 2 else blocks // 2
    return 2 <= splits <= MAX_CLUSTER and items(problem, config) * splits <= room


def resident(device: Device, config: TileConfig) -> int:
    """Resident thread blocks of the whole GPU."""
    return device.num_sms * config.blocks_per_sm


def longest(problem: Problem, config: TileConfig) -> int:
    """Tiles that are read of a sequence as long as the cache. If lengths differ: most tiles of any sequence, because a
    window may begin and end within a tile."""
    count = most_tiles if problem.uneven else num_tiles
    on_gpu = config.num_warps > 0
    return count(problem.seqlen_k, config.block_kv, problem.kernel_reach if on_gpu else problem.reach)


def _tiles(problem: Problem, config: TileConfig) -> int:
    """Tiles of all work items if all sequences are as long as the cache."""
    return longest(problem, config) * items(problem, config)


def _shares(problem: Problem, device: Device, config: TileConfig) -> Cut:
    """Balanced shares. If lengths differ, the planned shares fill WAVES waves, and the kernel uses one wave or more of
    them (:class:`cufa.schedule.decode.Shares`)."""
    waves, tiles = WAVES if problem.uneven else 1, _tiles(problem, config)
    shares = waves * min(resident(device, config), tiles)
    used = min(shares, tiles)
    reason = f"at most {used:,} shares: {waves} per resident block, and at most one per tile"
    return Cut("balanced", shares, (reason,))


def _in_cluster(problem: Problem, device: Device, config: TileConfig) -> Cut | None:
    """Fixed splits merged in clusters. None: under two splits, or too many for a cluster where the cache is large."""
    tiles, rows = longest(problem, config), config.block_q // 16
    size = next((n for n in (8, 4, 2) if cluster_fits(problem, device, config, n)), 1)
    splits = used_of(tiles, min(size, tiles))
    wanted = _worth_splitting(problem, device, config)
    small = wanted <= 2 * size and problem.kv_bytes() * rows <= size * _CLUSTER_BYTES
    if splits < 2 or not (wanted <= size or small):
        return None
    reason = (
        f"{splits} splits per sequence, merged in a cluster of {splits} blocks: a small cache or a full GPU"
    )
    return Cut("fixed", splits, (reason,), in_cluster=True)


def _many_in_clusters(problem: Problem, device: Device, config: TileConfig) -> Cut | None:
    """On slow memory, work items that fill the GPU: each is cut into two or four splits of four tiles or more, merged
    in a cluster. As with whole work items a fast SM takes more of them, and the last ones are smaller."""
    tiles, count = longest(problem, config), items(problem, config)
    splits = max(n for n in (1, 2, 4) if 4 * n <= tiles or n == 1)
    fills = count >= FULL_WAVE * resident(device, config) and _whole_items(problem, device, config, splits)
    if not fills or splits == 1 or problem.uneven:
        return None
    reason = (
        f"{count:,} work items fill the GPU: {splits} splits of each, merged in a cluster of {splits} blocks"
    )
    return Cut("fixed", used_of(tiles, splits), (reason,), in_cluster=True)


def _worth_splitting(problem: Problem, device: Device, config: TileConfig) -> int:
    """Splits of each sequence: the optimum of read and merge, limited to one wave and to about two tiles or more per
    split. With n splits, a read takes bytes/n and a merge takes n × the bytes of ``merge_bytes``: n is a square
    root."""
    worth = math.isqrt(item_bytes(problem) // merge_bytes(problem, config))
    return max(1, min(_one_wave(problem, device, config), worth))


def item_bytes(problem: Problem) -> int:
    """Bytes of keys and values of a work item of a full sequence."""
    return problem.kv_bytes() // (problem.batch * problem.kv_heads)


def merge_bytes(problem: Problem, config: TileConfig) -> int:
    """Cost of one more partial result in the merge, as the bytes that a block reads in this time."""
    several = config.block_q == 16 and row_blocks(problem, config) > 1
    return _MERGE_BYTES * (3 if several else 2) * 8 // config.block_q


def _one_wave(problem: Problem, device: Device, config: TileConfig) -> int:
    """Most splits with which all blocks are resident at once and each split has about two tiles or more."""
    tiles = longest(problem, config)
    return max(1, min((tiles + 1) // 2, resident(device, config) // items(problem, config)))


def _whole_items(problem: Problem, device: Device, config: TileConfig, splits: int = 1) -> bool:
    """Whether one block per split of a work item is faster than shares: the conditions at ``_FULL_WAVES``."""
    count, blocks = items(problem, config) * splits, resident(device, config)
    full = count / (-(-count // blocks) * blocks)
    short = item_bytes(problem) <= _ITEM_BYTES
    return device.slow_memory and config == TWO_STAGES and short and full >= _FULL_WAVES


def _through_memory(
    problem: Problem, device: Device, config: TileConfig, shares: Cut, must_be_fixed: bool
) -> Cut:
    tiles, count, blocks = longest(problem, config), items(problem, config), resident(device, config)
    wave, wanted = _one_wave(problem, device, config), _worth_splitting(problem, device, config)
    splits = used_of(tiles, wanted)
    cut_text = f"{splits} splits per sequence"
    if wanted < wave:
        return Cut("fixed", splits, (f"{cut_text}: the merge of more splits would cost more than they save",))
    each = -(-tiles // splits)
    if count <= blocks and each <= 2:
        return Cut("fixed", splits, (f"{cut_text}: a short cache, at most two tiles per split",))
    if count > blocks:
        reason = f"{count:,} work items for {blocks} resident blocks"
        if _whole_items(problem, device, config):
            return Cut("fixed", 1, (f"{reason} fill whole waves: each block reads a whole work item",))
        if must_be_fixed:
            return Cut("fixed", splits, (f"{cut_text}: {reason}",))
        return dataclasses.replace(shares, reasons=(f"{reason}: shares of all tiles", *shares.reasons))
    full = count * tiles / (blocks * each)
    if full >= FULL_WAVE or must_be_fixed:
        reason = f"{cut_text} fill one wave of {blocks} blocks to {full:.0%}"
        return Cut("fixed", splits, (reason,))
    reason = f"fixed splits fill only {full:.0%} of one wave of {blocks} blocks: shares of all tiles"
    return dataclasses.replace(shares, reasons=(reason, *shares.reasons))
