"""Whether the forward splits keys: into how many splits, on which tiles, and why. Pure Python, as the planner.

A query block and head is one item of work. Where items are fewer than the thread blocks that a GPU holds, the keys
of each may be split over several (Flash-Decoding, for tiles of many queries), and query heads that share keys may
share a tile. Time is estimated in seconds of an H200; what is compared are its ratios, which other GPUs share as
far as products and memory grow together:

    tile     = 4 head_dim block_q block_kv / FLOP/s of a thread block: ``Kernel.flops``, over the blocks on its SM;
               at least ``Kernel.tile_latency``, which is what binds a block that has its SM for itself
    block    = (tiles of a split + ITEM_COST) tile
    products = block × waves,   waves = ⌈blocks / blocks that the GPU holds⌉; items of every length: their sum over
               the blocks held, at least the longest
    parts    = splits × rows × (head_dim + 4) × 4 bytes, written once and read once
    read     = bytes of keys and values / (BANDWIDTH × the part of the SMs that have a block, on average over waves)
    time     = max(products, read) + UNHIDDEN min(products, read) + 2 parts / PARTS_BANDWIDTH + MERGE_SECONDS

ITEM_COST, 0.5 tiles, is that of :mod:`cufa.schedule.order`.
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
from ..schedule.order import ITEM_COST
from ..schedule.schedule import Schedule, used_of
from .operation import Choice, Request

#: Bytes per second: what an H200 copies at (cufa/records).
BANDWIDTH = 4.2e12

#: Less than BANDWIDTH; chosen by the plans that follow, not measured. With 4.2e12 here the keys of fa2_forward,
#: 1 × 8 × 1,024, d128, causal, were split in four, which took 36.7 µs on an H100 (full and unsplit it takes 26.8). With
#: 3.4e12 they are not, and every other recorded call (cufa/records) has as many splits as with 4.2e12.
PARTS_BANDWIDTH = 3.4e12

#: Assumed, not measured: the fraction of the shorter of products and reads that the longer does not hide.
UNHIDDEN = 0.1

#: A second launch, and the cost of storing and merging parts in addition to their bytes. Calls of less than 80 µs with
#: up to 8 splits exceeded an estimate with 3 µs by 8.5 µs (median of 84), those without splits by 4.2 µs (of 20): H200,
#: bfloat16, 26 shapes of 16 to 1,024 queries. With 3 µs, 1 × 32/8 × 128 × 2,048 was split, which took 1.09 of the time.
MERGE_SECONDS = 7e-6

#: Items differ in length if the longest visits more than this many times the tiles of the shortest.
_ALIKE = 1.1

#: Keys are split if the expected time is at most this fraction: the estimate is not more accurate, and the second
#: launch also costs host time.
_WORTH = 0.9


@dataclasses.dataclass(frozen=True)
class Estimate:
    config: TileConfig
    splits: int
    seconds: float


def with_splits(problem: Problem, device: Device, choice: Choice, request: Request) -> Choice:
    """The choice, or its kernel with the keys split. Raises ValueError where it cannot do the splits asked for."""
    spec, asked = choice.spec, request.num_splits
    named = request.config if request.config is not None and _splits(request.config) else None
    if asked == 1 and named is None:
        return dataclasses.replace(
            choice, reasons=(*choice.reasons, "num_splits=1 was asked for: keys are not split")
        )
    reason = refusal(spec, problem, split_keys=True)
    if request.config is not None and named is None and asked is not None:
        reason = (
            f"config={request.config} does not split keys; take one of KERNELS[{spec.name!r}].split_configs"
        )
    if reason is not None and (asked is not None or named is not None):
        raise ValueError(
            f"num_splits={asked}: keys are not split here: {reason}. Fix: leave num_splits at None"
        )
    if reason is not None or (request.config is not None and named is None):
        return choice
    configs = [named] if named is not None else _fitting(spec, problem, device)
    if asked is None and named is None and not _few_items(problem, device, choice.config):
        return choice
    best = min(
        _estimates(problem, device, spec, configs, asked), key=lambda found: found.seconds, default=None
    )
    if best is None:
        if asked is None:
            return choice
        raise ValueError(
            f"num_splits={asked}: no tiles with split keys fit head_dim {problem.head_dim} on {device.name}"
        )
    if asked is not None or named is not None:
        return _chosen(spec, problem, best, (*choice.reasons, *_asked(asked, best)))
    whole, held = (
        seconds(problem, device, spec, choice.config, 1),
        _held(device, spec, choice.config, problem),
    )
    if best.seconds > _WORTH * whole:
        return choice
    reason = (
        f"{choice.config.query_items(problem)} items for {held} blocks at once: "
        f"splitting keys is expected to take {best.seconds / whole:.2f} of the time"
    )
    return _chosen(spec, problem, best, (*choice.reasons, reason))


def _chosen(spec: Kernel, problem: Problem, best: Estimate, reasons: tuple[str, ...]) -> Choice:
    tiles = f"tiles {best.config}: expected to be the fastest with {best.splits} splits"
    reasons = tuple(x for x in reasons if not x.startswith("tiles "))
    return Choice(spec, best.config, (*reasons, tiles), Split("fixed", best.splits))


def _asked(asked: int | None, best: Estimate) -> Iterator[str]:
    if asked is not None:
        yield f"num_splits={asked} was asked for"
        if best.splits < asked:
            yield f"{best.splits} are as many as there are tiles: no more would have work"


def _splits(config: TileConfig) -> bool:
    return isinstance(config, SplitConfig) and config.split_keys


def _fitting(spec: Kernel, problem: Problem, device: Device) -> list[TileConfig]:
    """The kernel's split configs that fit, and whose packed heads share keys."""
    fitting = spec.fitting(spec.split_configs, problem.head_dim, device)
    return [config for config in fitting if problem.group_size % (config.block_q // config.head_rows) == 0]


def _few_items(problem: Problem, device: Device, config: TileConfig) -> bool:
    """Fewer items than SMs, or tiles with rows that heads could share. (If each SM has an item, and room for another,
    splits took 1.27 to 1.38 of the time: fa2_forward, 1 × 8 × 2,048, d128.)"""
    shared = problem.group_size > 1 and 2 * problem.seqlen_q <= config.block_q
    return shared or config.query_items(problem) < device.num_sms


def _held(device: Device, spec: Kernel, config: TileConfig, problem: Problem) -> int:
    """Thread blocks that the GPU runs at once."""
    arch = device.arch
    room = arch.shared_memory // (spec.shared_bytes(config, problem.head_dim) + arch.reserved_shared_memory)
    return device.num_sms * max(1, min(config.blocks_per_sm, room))


def _estimates(
    problem: Problem, device: Device, spec: Kernel, configs: Iterable[TileConfig], asked: int | None
) -> Iterator[Estimate]:
    for config in configs:
        most = int(_schedule(problem, config).visits.max())
        upto = max(2, 2 * _held(device, spec, config, problem) // config.query_items(problem))
        counts = range(1, min(most, upto) + 1) if asked is None else (min(asked, max(most, 1)),)
        for count in counts:
            yield Estimate(config, count, seconds(problem, device, spec, config, count))


@functools.lru_cache(64)  # each number of splits asks for it
def _schedule(problem: Problem, config: TileConfig) -> Schedule:
    return Schedule.of(problem, config.head_rows, config.block_kv, skip_masked_tiles=True)


def seconds(problem: Problem, device: Device, spec: Kernel, config: TileConfig, splits: int) -> float:
    """The estimate: see the head of this file."""
    schedule, items = _schedule(problem, config), config.query_items(problem)
    held = _held(device, spec, config, problem)
    most = max(int(schedule.visits.max()), 1)
    used = used_of(most, splits)
    on_an_sm = 1 if items * used <= device.num_sms else held // device.num_sms
    flops = 4 * problem.head_dim * config.block_q * config.block_kv
    tile = max(flops * on_an_sm / spec.flops(config), spec.tile_latency(config, problem.head_dim))
    block = (-(-most // splits) + ITEM_COST) * tile
    if most > _ALIKE * schedule.visits.min():
        work = schedule.visited * items / schedule.num_q_blocks + items * used * ITEM_COST
        products = max(block, work * tile / held)
    else:
        products = block * -(-items * used // held)
    keys = min(problem.seqlen_k, most * config.block_kv)
    of_keys = problem.k_element.itemsize + problem.v_element.itemsize
    kv_bytes = problem.batch * problem.kv_heads * keys * problem.head_dim * of_keys
    blocks = items * used
    busy = blocks / (-(-blocks // device.num_sms) * device.num_sms)
    read = kv_bytes / (BANDWIDTH * busy)
    time = max(products, read) + UNHIDDEN * min(products, read)
    if not _splits(config):
        return time
    parts = used * problem.batch * problem.heads * problem.seqlen_q * (problem.head_dim + 4) * 4
    return time + 2 * parts / PARTS_BANDWIDTH + MERGE_SECONDS
