"""Kernel, tiles and splits of a decode problem. Lengths are on the device: the plan knows only the capacity, and
whether lengths differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..gpu.architectures import Device
from ..kernels import Kernel, Split, TileConfig
from ..kernels.decode import MAX_CLUSTER, DecodeConfig, items
from ..problem.problem import Problem
from ..schedule.decode import WAVES
from .decode_splits import Cut, choose_cut, longest
from .operation import Choice, Request

if TYPE_CHECKING:
    from .planner import Plan

#: A tile in NumPy: enough keys to amortise calls, and enough query rows that a tile of keys is converted once.
CPU_CONFIG = TileConfig(block_q=256, block_kv=256, num_warps=0)

#: Least tiles of a split that are worth a merge on the CPU.
_CPU_TILES = 8

_MAX_TILES = 2**31 - 1


def choose(problem: Problem, device: Device | None, serving: list[Kernel], request: Request) -> Choice:
    """Fixed splits or shares of all tiles, how many, and where partial results are merged."""
    reasons = [] if request.algorithm == "auto" else [f"schedule={request.algorithm!r} was asked for"]
    if request.num_splits is not None:
        reasons.append(f"num_splits={request.num_splits} was asked for")
    if device is None:
        config, cut = request.config or CPU_CONFIG, _cut_for_cpu(problem, request)
    else:
        config, cut = _cut_for_gpu(problem, device, serving, request)
    reasons += cut.reasons
    count, most = cut.num_splits, longest(problem, config)
    if cut.schedule == "balanced":
        most *= items(problem, config) * (WAVES if problem.lengths.ragged and device is not None else 1)
    if count > most:
        count = most
        reasons.append(f"{most} are as many as there are tiles: no more would have work")
    if device is None:
        reasons.append("no GPU in this plan: NumPy does the same splits and merges, of larger tiles")
    else:
        _check_tiles(problem, config)
    named = [spec for spec in serving if spec.algorithm == cut.schedule]
    spec = cpu_spec(named) if device is None else named[0]
    return Choice(spec, config, tuple(reasons), Split(cut.schedule, count, -(-count // WAVES)))


def cpu_spec(named: list[Kernel]) -> Kernel:
    """On the CPU the kernel's name only says which schedule: NumPy serves every problem."""
    return next((spec for spec in named if not spec.uses_copy_engine), named[0])


def plan_lines(plan: Plan) -> list[str]:
    problem, keys = plan.problem, plan.config.block_kv
    assert plan.split is not None
    cut = {"fixed": "fixed splits of each sequence", "balanced": "shares of all tiles"}[plan.split.kind]
    return [
        f"tiles      {plan.config}: {problem.rows} query rows per key/value head, "
        f"{longest(problem, plan.config):,} tiles of {keys} keys in a full sequence",
        f"splits     {plan.split.kind}: {plan.split.count} {cut}, {items(problem, plan.config):,} items",
    ]


def ragged_shares(plan: Plan) -> bool:
    """Whether shares have two sizes (:class:`~cufa.schedule.decode.Shares`), because SMs read at different speeds.
    Threads of a CPU do not."""
    return plan.problem.lengths.ragged and plan.device is not None


def num_records(plan: Plan) -> int:
    """Trace records: one per split of a work item; balanced, one per sum of share and work item."""
    assert plan.split is not None
    count = items(plan.problem, plan.config)
    return count * plan.split.count if plan.split.kind == "fixed" else count + plan.split.count


def _check_tiles(problem: Problem, config: TileConfig) -> None:
    """Tiles must fit the kernels' 32-bit counters."""
    tiles = longest(problem, config) * items(problem, config)
    if tiles > _MAX_TILES:
        raise ValueError(
            f"batch {problem.batch:,} with room for {problem.seqlen_k:,} tokens each makes {tiles:,} tiles "
            f"of keys; kernels count up to {_MAX_TILES:,}: pass fewer columns of block_table, or fewer "
            "sequences"
        )


def _cut_for_gpu(
    problem: Problem, device: Device, serving: list[Kernel], request: Request
) -> tuple[TileConfig, Cut]:
    """The tile config, which says where partial results are merged, and the cut. The caller's config stays."""
    schedule, num_splits = request.algorithm, request.num_splits
    if request.config is not None:
        config = request.config
        assert isinstance(config, DecodeConfig)
        cut = choose_cut(problem, device, config, schedule, num_splits)
        if config.cluster_merge and cut.num_splits > MAX_CLUSTER:
            reason = f"{MAX_CLUSTER} splits: these tiles merge in clusters, which have no more blocks"
            cut = Cut(cut.schedule, MAX_CLUSTER, (reason,))
        return config, cut
    fitting = serving[0].fitting(serving[0].configs, problem.head_dim, device)
    config = serving[0].choose(problem, fitting, device)
    in_cluster = config.merged_in_cluster()
    cut = choose_cut(problem, device, config, schedule, num_splits, clusters=in_cluster in fitting)
    return in_cluster if cut.in_cluster else config, cut


def _cut_for_cpu(problem: Problem, request: Request) -> Cut:
    """Splits or shares that are worth a merge in NumPy."""
    schedule, num_splits = request.algorithm, request.num_splits
    tiles, count = longest(problem, CPU_CONFIG), items(problem, CPU_CONFIG)
    if num_splits is not None:
        return Cut("fixed" if schedule == "auto" else schedule, num_splits, ())
    ragged = problem.lengths.ragged and problem.batch > 1
    if schedule == "balanced" or (schedule == "auto" and ragged):
        shares = max(1, min(tiles * count // _CPU_TILES, 16))
        return Cut("balanced", shares, (f"{shares} shares of {_CPU_TILES} tiles or more",))
    splits = max(1, min(tiles // _CPU_TILES, 16))
    return Cut("fixed", splits, (f"{splits} splits of {_CPU_TILES} tiles or more",))
