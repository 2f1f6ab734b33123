"""The operation decode: operands, scalars, choice of kernel, tiles and splits.

Lengths are on the device: a plan knows only the capacity, and whether lengths differ.
:mod:`cufa.plan.decode_splits` decides how the keys are cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..gpu.architectures import Device
from ..kernels import Kernel, Split, TileConfig
from ..kernels.decode import MAX_CLUSTER, DecodeConfig, items, row_blocks
from ..kernels.params import Params, softmax_scalars
from ..problem.columns import Chunks
from ..problem.lengths import Cached
from ..problem.mask import CAUSAL, Band, Mask
from ..problem.problem import Problem, default_scale
from ..schedule.decode import WAVES, most_chunks, num_tiles
from ..schedule.schedule import used_of
from .candidates import tuning_key
from .decode_splits import Cut, choose_cut, longest
from .operation import (
    OPERATIONS,
    PER_HEAD,
    SCORE_ARRAYS,
    Arrays,
    Choice,
    Operand,
    Operation,
    Request,
    stride_of_sequences,
)

if TYPE_CHECKING:
    from .planner import Plan

#: On the CPU, splits or shares of fewer tiles are not worth a merge.
_CPU_TILES = 8

_MAX_TILES = 2**31 - 1

_PARTS = {"fixed": "fixed splits of each sequence", "balanced": "shares of all tiles"}

#: Query tokens and masks of the builds that `cufa compile` checks: one per kind of mask, for one token and several.
_MASKS: tuple[tuple[int, Mask], ...] = (
    (1, CAUSAL), (4, CAUSAL), (1, Band(255, 0)), (4, Band(255, 0, keep=4)),
    (4, Band(255, 0, prefix=4, global_tokens=4)), (4, Chunks(256)),
)  # fmt: skip

#: Options of these builds: none, slopes and sinks, a fixed maximum from either source, invariance, trees.
_OPTIONAL: tuple[dict[str, Any], ...] = (
    {}, {"alibi": True, "sink": True}, {"softmax_max": "bound"}, {"softmax_max": 0.0}, {"invariant": True},
    {"tree": "parents"}, {"tree": "matrix"},
)  # fmt: skip

#: Caches of these builds: contiguous or paged, full or with given lengths, with or without new tokens.
_CACHES = tuple(
    dataclasses.replace(place, given=given, new_tokens=new_tokens)
    for place in (Cached(page_size=64, max_pages=16, num_pages=16), Cached())
    for given, new_tokens in ((True, 0), (True, 1), (False, 0))
)


class Decode(Operation):
    name = "decode"
    title = "Decode"
    operands = (
        Operand("q", stride="q_stride"),
        Operand("k_cache", written=True, mapped=True, stride="k_stride"),
        Operand("v_cache", written=True, mapped=True, stride="v_stride"),
        Operand("cache_seqlens"),
        Operand("block_table"),
        Operand("k_new", stride="k_new_stride"),
        Operand("v_new", stride="v_new_stride"),
        Operand("k_scale", written=True),
        Operand("v_scale", written=True),
        Operand("out", field="o", result=True, like="q", stride="o_stride"),
        Operand("lse", result=True, like=lambda p: p.lse_shape, nothing=-math.inf),
    )
    optional_operands = (
        *PER_HEAD,
        Operand("key_norms", written=True),
        Operand("softmax_max"),
        Operand("tree"),
        *SCORE_ARRAYS,
    )
    params = Params("decode/params.cuh", "DecodeParams")
    scored_params = Params("decode/params.cuh", "ScoredDecodeParams")
    # Enough keys to amortise NumPy's call overhead, and enough query rows that each tile of keys is converted once.
    cpu_config = TileConfig(block_q=256, block_kv=256, num_warps=0)
    split_selects_kernel = True
    memory_bound = True

    def choose(
        self, problem: Problem, device: Device | None, serving: list[Kernel], request: Request
    ) -> Choice:
        """Choose fixed splits or shares of all tiles, their number, and where partial results are merged."""
        reasons = [] if request.algorithm == "auto" else [f"schedule={request.algorithm!r} was asked for"]
        if request.num_splits is not None:
            reasons.append(f"num_splits={request.num_splits} was asked for")
        if device is None:
            config, cut = request.config or self.cpu_config, _cut_for_cpu(problem, request)
        else:
            config, cut = _cut_for_gpu(problem, device, serving, request)
        reasons += cut.reasons
        count, most = cut.num_splits, longest(problem, config) + problem.invariant
        if cut.schedule == "balanced":
            most *= items(problem, config) * (WAVES if problem.uneven and device is not None else 1)
        if count > most:
            count = most
            reasons.append(f"num_splits is reduced to {most}: there are no more tiles")
        if device is None:
            reasons.append("no GPU in this plan: NumPy executes the same splits and merges on larger tiles")
        else:
            _check_tiles(problem, config)
        named = [spec for spec in serving if spec.algorithm == cut.schedule]
        spec = self.cpu_kernel(named) if device is None else named[0]
        return Choice(spec, config, tuple(reasons), Split(cut.schedule, count, -(-count // WAVES)))

    def cpu_kernel(self, named: list[Kernel]) -> Kernel:
        """The kernel without TMA, if there is one. On the CPU, the kernel's name only selects the schedule."""
        return next((spec for spec in named if not spec.uses_copy_engine), named[0])

    def params_of(self, problem: Problem) -> Params:
        return self.params if problem.score is None else self.scored_params

    @staticmethod
    def mask_members(params: Any) -> Any:
        return params

    def plan_lines(self, plan: Plan) -> list[str]:
        problem, keys = plan.problem, plan.config.block_kv
        assert plan.split is not None
        cut = _PARTS[plan.split.kind]
        return [
            f"tiles      {plan.config}: {problem.rows} query rows per key/value head, "
            f"{longest(problem, plan.config):,} tiles of {keys} keys in a full sequence",
            f"splits     {plan.split.kind}: {plan.split.count} {cut}, {items(problem, plan.config):,} work items",
        ]

    def num_records(self, plan: Plan) -> int:
        """Fixed: one per split of a work item. Balanced: at most shares + work items."""
        assert plan.split is not None
        count = items(plan.problem, plan.config)
        return count * plan.split.count if plan.split.kind == "fixed" else count + plan.split.count

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        p = plan.problem
        assert plan.split is not None
        first, _ = p.mask.edges(p.seqlen_q, p.seqlen_k) if p.mask.irregular_kind else p.edges
        tiles = num_tiles(p.seqlen_k, plan.config.block_kv, p.kernel_reach)
        table, slopes = arrays["block_table"], arrays.get("alibi_slopes")
        return {
            "batch": p.batch,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "tokens": p.seqlen_q,
            "capacity": p.seqlen_k,
            "page_size": max(p.cache.page_size, 1),
            "num_pages": p.cache.num_pages,
            "new_tokens": p.cache.new_tokens,
            "table_stride": 0 if table is None else table.strides[0] // 4,
            "group_size": p.group_size,
            "row_blocks": row_blocks(p, plan.config),
            "num_splits": plan.split.count,
            "min_shares": plan.split.least,
            "split_tiles": -(-tiles // plan.split.count),
            "used_splits": used_of(tiles, plan.split.count),
            "left": p.seqlen_k if first is None else min(p.seqlen_k - p.seqlen_q - first, p.seqlen_k),
            **_mask_scalars(p),
            "alibi_stride": stride_of_sequences(slopes),
            "fixed_max": p.softmax_max if isinstance(p.softmax_max, float) else 0.0,
            **softmax_scalars(p.scale if p.score is None else 1.0, p.softcap),
            **({} if p.score is None else {"score_scale": p.scale}),
        }

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """Every element with every kind of mask and cache, with and without soft cap, with all optional operands and
        with none; scales of tokens and blocks without slopes and sinks. With several tokens, masks differ from row to
        row."""
        for dtype, (tokens, mask), softcap, lengths, optional in itertools.product(
            kernel.dtypes, _MASKS, (None, 30.0), _CACHES, _OPTIONAL
        ):
            if "tree" in optional and (tokens == 1 or mask != CAUSAL):
                continue
            problem = Problem(
                1, 8, 1, tokens, 1024, head_dim, dtype, mask, default_scale(head_dim), softcap,
                lengths=lengths,
            )  # fmt: skip
            for k_dtype in kernel.k_dtypes or (None,):
                found = dataclasses.replace(
                    problem, k_dtype=k_dtype, v_dtype=k_dtype, operation="decode", **optional
                )
                for mode in () if found.alibi else kernel.scales.get("k", ()):
                    own = dataclasses.replace(
                        lengths, quantize_new=mode == "token" and lengths.new_tokens > 0
                    )
                    yield dataclasses.replace(found, scales=("", mode, mode), lengths=own)
                if not kernel.scales:
                    yield found


DECODE = Decode()
OPERATIONS[DECODE.name] = DECODE


def _mask_scalars(problem: Problem) -> dict[str, int]:
    """Members of DecodeParams that an irregular mask decides, beside its arrays."""
    found = {name: x for name, x in problem.mask_params.items() if isinstance(x, int)}
    if "keep" not in found or problem.exempt_by_sequence:
        return found
    keep, prefix = (min(found[name], problem.seqlen_k) for name in ("keep", "prefix"))
    return {"keep": max(keep, prefix), "prefix": prefix}


def ragged_shares(plan: Plan) -> bool:
    """Whether shares may have two sizes (:class:`~cufa.schedule.decode.Shares`). SMs of a GPU read at different speeds;
    threads of a CPU do not."""
    return plan.problem.uneven and plan.device is not None


def _check_tiles(problem: Problem, config: TileConfig) -> None:
    """Tiles must fit the kernels' 32-bit counters."""
    tiles = longest(problem, config) * items(problem, config)
    if tiles > _MAX_TILES:
        raise ValueError(
            f"batch {problem.batch:,} with a capacity of {problem.seqlen_k:,} tokens each has {tiles:,} tiles "
            f"of keys; kernels count up to {_MAX_TILES:,}: pass fewer columns of block_table, or fewer "
            "sequences"
        )


def _cut_for_gpu(
    problem: Problem, device: Device, serving: list[Kernel], request: Request
) -> tuple[TileConfig, Cut]:
    """The tile config and the cut. The config decides where partial results are merged; the caller's config is kept."""
    schedule, num_splits = request.algorithm, request.num_splits
    if problem.invariant:
        fitting = serving[0].fitting(serving[0].configs, problem.head_dim, device)
        config = request.config or serving[0].choose(problem, fitting, device)
        return config, _chunks(problem, config)
    if request.config is not None:
        config = request.config
        assert isinstance(config, DecodeConfig)
        cut = choose_cut(problem, device, config, schedule, num_splits)
        if config.cluster_merge and cut.num_splits > MAX_CLUSTER:
            reason = f"{MAX_CLUSTER} splits: this config merges in clusters, of at most {MAX_CLUSTER} blocks"
            cut = Cut(cut.schedule, MAX_CLUSTER, (reason,))
        return config, cut
    fitting = serving[0].fitting(serving[0].configs, problem.head_dim, device, problem.v_dim)
    config = serving[0].choose(problem, fitting, device)
    tuned = request.tuned.get(tuning_key(serving[0], problem))
    applies = tuned is not None and tuned.config in fitting and tuned.planned == config
    if tuned is not None and applies and tuned.cut and (schedule, num_splits) == ("auto", None):
        return tuned.config, Cut(*tuned.cut, (f"{tuned.cut[1]} {_PARTS[tuned.cut[0]]}: {tuned.found}",))
    in_cluster = config.merged_in_cluster()
    cut = choose_cut(problem, device, config, schedule, num_splits, clusters=in_cluster in fitting)
    return in_cluster if cut.in_cluster else config, cut


def _chunks(problem: Problem, config: TileConfig) -> Cut:
    """Invariant: the caller's number of splits changes nothing."""
    reach = problem.kernel_reach if config.num_warps else problem.reach
    most = most_chunks(problem.seqlen_k, config.block_kv, reach)
    reason = (
        f"invariant: at most {most} chunks of each sequence, at fixed key positions, merged in their order"
    )
    cost = "invariance took 3% more time for 64 sequences of 8k and 12% for one, measured on an H100"
    return Cut("fixed", most, (reason, cost) if config.num_warps else (reason,))


def _cut_for_cpu(problem: Problem, request: Request) -> Cut:
    """The caller's splits, else splits or shares of at least ``_CPU_TILES`` tiles, at most 16 of them."""
    if problem.invariant:
        return _chunks(problem, request.config or DECODE.cpu_config)
    schedule, num_splits = request.algorithm, request.num_splits
    tiles, count = longest(problem, DECODE.cpu_config), items(problem, DECODE.cpu_config)
    if num_splits is not None:
        return Cut("fixed" if schedule == "auto" else schedule, num_splits, ())
    ragged = problem.lengths.ragged and problem.batch > 1
    balanced = schedule == "balanced" or (schedule == "auto" and ragged)
    parts = max(1, min((tiles * count if balanced else tiles) // _CPU_TILES, 16))
    name = "shares" if balanced else "splits"
    reason = f"{parts} {name}, each of at least {_CPU_TILES} tiles if there are several"
    return Cut("balanced" if balanced else "fixed", parts, (reason,))
