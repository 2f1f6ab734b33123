"""Whether the forward splits keys: into how many splits, on which tiles, and why.

A work item is a query block of a head. If a problem has fewer work items than the GPU has SMs, or queries for at most
half a tile, its keys may be split over thread blocks (Flash-Decoding, with tiles of many queries). Query heads of one
query group may then share a tile (packed heads), in whole arrays under band masks. Under an irregular mask, each split
has an equal share of all tiles, and visits the tiles in which its query block sees a key. The cost model estimates
seconds on an H200. Only ratios of estimates are compared; other GPUs have similar ratios if their FLOP/s and bandwidth
differ by similar factors:

    tile     = 4 head_dim block_q block_kv × blocks on an SM / ``Kernel.flops`` (FLOP/s of an SM);
               at least ``Kernel.tile_latency``, which decides if a block has its SM for itself
    block    = (tiles of a split + ITEM_COST) × tile
    products = block × ⌈blocks / resident blocks⌉, if items visit about equally many tiles; if not,
               the time of all blocks / resident blocks, and at least the time of the longest block
    partials = splits × rows × (head_dim + 4) × 4 bytes, written once and read once
    read     = bytes of keys and values / (BANDWIDTH × fraction of SMs that have a block, averaged over waves)
    time     = max(products, read) + UNHIDDEN min(products, read) + 2 partials / PARTIALS_BANDWIDTH + MERGE_SECONDS

ITEM_COST and ALIKE are those of :mod:`cufa.schedule.order`. Measurements: cuda_src/forward/fa2/NOTES.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ..gpu.architectures import Device
from ..kernels import Kernel, Split, TileConfig
from ..kernels.config import SplitConfig
from ..kernels.support import refusal
from ..problem.problem import Problem
from ..schedule.order import ALIKE, ITEM_COST
from ..schedule.schedule import Schedule, used_of
from .operation import Choice, Request

#: Bytes per second of a copy on an H200 (cufa/records).
BANDWIDTH = 4.2e12

#: Bytes per second of partial results. Not measured: with BANDWIDTH, one recorded call is split although this is
#: slower.
PARTIALS_BANDWIDTH = 3.4e12

#: Assumed, not measured: fraction of the shorter of products and reads that the longer does not hide.
UNHIDDEN = 0.1

#: The second launch, and the cost of storing and merging partial results in addition to their bytes.
MERGE_SECONDS = 7e-6

#: Keys are split if the estimate is at most this fraction of the estimate without splits: smaller gains are within the
#: model's error, and the second launch also costs host time.
_WORTH = 0.9


@dataclasses.dataclass(frozen=True)
class Estimate:
    config: TileConfig
    splits: int
    seconds: float


def with_splits(problem: Problem, device: Device, choice: Choice, request: Request) -> Choice:
    """``choice``, or its kernel with keys split. Raises ValueError if ``request`` asks for splits that the kernel
    cannot run."""
    spec, num_splits = choice.spec, request.num_splits
    named = request.config if request.config is not None and _splits(request.config) else None
    if num_splits == 1 and named is None:
        return dataclasses.replace(
            choice, reasons=(*choice.reasons, "num_splits=1 was asked for: keys are not split")
        )
    reason = refusal(spec, problem, split_keys=True)
    if request.config is not None and named is None and num_splits is not None:
        reason = (
            f"config={request.config} does not split keys; pass one of KERNELS[{spec.name!r}].split_configs"
        )
    if reason is not None and (num_splits is not None or named is not None):
        raise ValueError(_cannot_split(num_splits, named, reason))
    if reason is not None or (request.config is not None and named is None):
        return choice
    configs = [spec.over_cache(named, problem)] if named is not None else _fitting(spec, problem, device)
    if num_splits is None and named is None and not _few_items(problem, device, spec, choice.config):
        return choice
    best = min(
        _estimates(problem, device, spec, configs, num_splits), key=lambda found: found.seconds, default=None
    )
    if best is None:
        if num_splits is None:
            return choice
        raise ValueError(
            f"num_splits={num_splits}: no config that splits keys fits head_dim {problem.dims_text} on {device.name}. "
            "Fix: leave num_splits at None"
        )
    if num_splits is not None or named is not None:
        return _chosen(spec, problem, best, (*choice.reasons, *_request_reasons(num_splits, best)))
    whole, held = (
        seconds(problem, device, spec, choice.config, 1),
        _held(device, spec, choice.config, problem),
    )
    if best.seconds > _WORTH * whole:
        return choice
    reason = (
        f"{choice.config.query_items(problem)} work items for {held} resident blocks: "
        f"splitting keys is expected to take {best.seconds / whole:.2f} of the time"
    )
    return _chosen(spec, problem, best, (*choice.reasons, reason))


def _cannot_split(num_splits: int | None, named: TileConfig | None, reason: str) -> str:
    arguments = [f"num_splits={num_splits}"] * (num_splits is not None)
    arguments += [f"config={named}"] * (named is not None)
    fixes = ["leave num_splits at None"] * (num_splits is not None)
    fixes += ["pass a config without split_keys, or leave config at None"] * (named is not None)
    return f"{' with '.join(arguments)}: keys cannot be split: {reason}. Fix: {'; '.join(fixes)}"


def _chosen(spec: Kernel, problem: Problem, best: Estimate, reasons: tuple[str, ...]) -> Choice:
    tiles = f"tiles {best.config}: expected to be the fastest with {best.splits} splits"
    reasons = tuple(x for x in reasons if not x.startswith("tiles "))
    return Choice(spec, best.config, (*reasons, tiles), Split("fixed", best.splits))


def _request_reasons(num_splits: int | None, best: Estimate) -> Iterator[str]:
    if num_splits is not None:
        yield f"num_splits={num_splits} was asked for"
        if best.splits < num_splits:
            yield f"num_splits is reduced to {best.splits}: there are no more tiles"


def _splits(config: TileConfig) -> bool:
    return isinstance(config, SplitConfig) and config.split_keys


def _fitting(spec: Kernel, problem: Problem, device: Device) -> list[TileConfig]:
    """The kernel's split configs that fit the device, and whose packed heads divide the query group."""
    fitting = spec.fitting(spec.split_configs, problem.head_dim, device, problem.v_dim)
    divide = (config for config in fitting if problem.group_size % (config.block_q // config.head_rows) == 0)
    fitting = tuple(config for config in divide if refusal(spec, problem, config=config) is None)
    return [spec.over_cache(config, problem) for config in fitting]


def _few_items(problem: Problem, device: Device, spec: Kernel, config: TileConfig) -> bool:
    """Fewer work items than SMs, or tiles at most half full of queries that other heads of the query group could share:
    for causal queries, also tiles that only split (not measured for others). If each SM has an item, splits are slower
    even if another block would be resident."""
    tiles = [config, *_fitting(spec, problem, device)] if problem.later_rows_see_more else [config]
    shared = problem.group_size > 1 and 2 * problem.seqlen_q <= max(x.block_q for x in tiles)
    return shared or config.query_items(problem) < device.num_sms


def _held(device: Device, spec: Kernel, config: TileConfig, problem: Problem) -> int:
    """Resident thread blocks of the whole GPU."""
    arch = device.arch
    shared = spec.shared_bytes(config, problem.head_dim, problem.v_dim)
    room = arch.shared_memory // (shared + arch.reserved_shared_memory)
    return device.num_sms * max(1, min(config.blocks_per_sm, room))


def _estimates(
    problem: Problem, device: Device, spec: Kernel, configs: Iterable[TileConfig], num_splits: int | None
) -> Iterator[Estimate]:
    for config in configs:
        most = _most_tiles(problem, config)
        # Two waves of blocks. Up to four splits may fill more waves: measured faster, NOTES.md.
        upto = max(4, 2 * _held(device, spec, config, problem) // config.query_items(problem))
        counts = range(1, min(most, upto) + 1) if num_splits is None else (min(num_splits, max(most, 1)),)
        for count in counts:
            yield Estimate(config, count, seconds(problem, device, spec, config, count))


def _most_tiles(problem: Problem, config: TileConfig) -> int:
    """The most tiles that a query block shares out."""
    if problem.tiles_are_listed:  # visited or not, and in any of the sequences
        return -(-problem.seqlen_k // config.block_kv)
    return int(_schedule(problem, config).visits.max())


@functools.lru_cache(64)  # the same for every number of splits
def _schedule(problem: Problem, config: TileConfig) -> Schedule:
    return Schedule.of(problem, config.head_rows, config.block_kv, skip_masked_tiles=True)


def seconds(problem: Problem, device: Device, spec: Kernel, config: TileConfig, splits: int) -> float:
    """The estimate of the cost model at the head of this file."""
    schedule, items = _schedule(problem, config), config.query_items(problem)
    held = _held(device, spec, config, problem)
    most = max(int(schedule.visits.max()), 1)
    used = used_of(most, splits)
    on_an_sm = 1 if items * used <= device.num_sms else held // device.num_sms
    flops = 2 * (problem.head_dim + problem.v_dim) * config.block_q * config.block_kv
    tile = max(flops * on_an_sm / spec.flops(config), spec.tile_latency(config, problem.head_dim))
    block = (-(-most // splits) + ITEM_COST) * tile
    if most > ALIKE * schedule.visits.min():
        work = schedule.visited * items / schedule.num_q_blocks + items * used * ITEM_COST
        products = max(block, work * tile / held)
    else:
        products = block * -(-items * used // held)
    keys = min(problem.seqlen_k, most * config.block_kv)
    kv_bytes = problem.batch * problem.kv_heads * keys * problem.key_bytes
    blocks = items * used
    busy = blocks / (-(-blocks // device.num_sms) * device.num_sms)
    read = kv_bytes / (BANDWIDTH * busy)
    time = max(products, read) + UNHIDDEN * min(products, read)
    if not _splits(config):
        return time
    partials = used * problem.batch * problem.heads * problem.seqlen_q * (problem.v_dim + 4) * 4
    return time + 2 * partials / PARTIALS_BANDWIDTH + MERGE_SECONDS
