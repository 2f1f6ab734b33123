"""The operations forward and backward: operands, scalars, choice of kernel and tiles, compiled builds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..gpu.architectures import Device
from ..kernels import Kernel, TileConfig
from ..kernels.backward.fa2 import STRIP
from ..kernels.params import Params, softmax_scalars, strides_of
from ..problem.bits import Bits
from ..problem.columns import Columns
from ..problem.dropout import kept_factor
from ..problem.float8 import NAME as E4M3
from ..problem.float8 import key_tile
from ..problem.integers import Integers
from ..problem.lengths import Cached, Packed, Padded
from ..problem.mask import CAUSAL, FULL, Band
from ..problem.problem import MAX_SIZE, Problem, default_scale
from ..schedule.key_order import (
    has_head_batches,
    has_listed_tickets,
    has_small_head_batches,
    head_batches,
    listed_batches,
)
from .candidates import serving_configs, tuning_key
from .operation import (
    CACHE,
    OPERATIONS,
    PER_HEAD_AND_LENGTHS,
    RUNNING,
    SCALES,
    SCORE_ARRAYS,
    SCORE_GRADIENTS,
    SEED,
    Arrays,
    Choice,
    Operand,
    Operation,
    Request,
    stride_of_sequences,
)
from .splits import with_splits

if TYPE_CHECKING:
    from .planner import Plan

_OPTIONAL: tuple[dict[str, Any], ...] = (
    {},
    {"lengths": Padded((1024,), (1024,)), "sink": True},
    {"lengths": Packed(1024, 1024, (1024,), (1024,)), "alibi": True},
    {"lengths": Packed(1024, 1024, (1024,), (1024,))},
    {"alibi": True, "sink": True},
    {"lengths": Packed(1024, 1024, (1024,), (1024,), Cached(16, 64, 64, True, 1024))},
    {"lengths": Padded((1024,), (1024,), cache=Cached(given=True)), "alibi": True, "sink": True},
    {"dropped": 26},
    {"float32_gradients": ("dq", "dk", "dv")},
)
"""Optional operands of the builds that `cufa compile` checks. Not checked: padded with ALiBi, packed with a sink."""

_OF_E4M3: tuple[dict[str, Any], ...] = (
    {"scales": ("head",) * 3, "out_dtype": "bfloat16", "values_in_rows": True},
    {"scales": ("block", "block", "tensor"), "out_dtype": "float16", "accumulate": "tile"},
    {"scales": ("tensor",) * 3, "out_dtype": "bfloat16", "lengths": Padded((1024,), (1024,))},
    {
        "scales": ("block", "block", "head"),
        "out_dtype": "float16",
        "lengths": Packed(1024, 1024, (1024,), (1024,)),
    },
)
"""Options of these builds for inputs of e4m3."""

#: One mask of each kind, for the same builds.
_MASKS = (
    FULL,
    CAUSAL,
    Band(255, 0),
    Band(right=0, prefix=100),
    *(Columns(CAUSAL, Integers(np.full((2 * runs, 1, 1, 1024), 512))) for runs in (1, 2)),
    Bits.of(np.tri(1024, dtype=bool)[None, None]),
)

_MEASURED = (90,)
"""Architectures on which the registry's tiles were measured. On other architectures the same tiles are used if they
fit."""


class DenseOperation(Operation):
    """Base class of forward and backward."""

    optional_operands = PER_HEAD_AND_LENGTHS

    def choose(
        self, problem: Problem, device: Device | None, serving: list[Kernel], request: Request
    ) -> Choice:
        """The first serving kernel. Its tiles: the caller's, else measured ones, else those expected to be fastest."""
        if device is None:
            reason = "no GPU in this plan: NumPy executes the same schedule on larger tiles"
            if problem.invariant:
                raise ValueError(
                    "invariant=True needs a GPU and 16-bit elements: sums of NumPy's products depend on the number of "
                    "rows; leave it out"
                )
            if request.num_splits is not None:
                reason += f"; keys are not split (num_splits={request.num_splits} is for GPUs)"
            config = self.cpu_config
            if problem.scales:  # the kernels' key tiles: rounded weights depend on their width
                config = dataclasses.replace(config, block_kv=key_tile(problem.head_dim))
            return Choice(self.cpu_kernel(serving), request.config or config, (reason,))
        choice = _whole(problem, device, serving[0], request)
        choice = dataclasses.replace(choice, config=choice.spec.over_cache(choice.config, problem))
        choice = with_splits(problem, device, choice, request)
        return dataclasses.replace(choice, reasons=choice.reasons + choice.spec.reasons(problem))

    def cpu_kernel(self, named: list[Kernel]) -> Kernel:
        """FA2's kernel if ``named`` has it: by default, NumPy follows FA2's schedule."""
        return next((kernel for kernel in named if kernel.algorithm == "fa2"), named[0])

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        """The scalars that the parameter structures of forward and backward share."""
        p = plan.problem
        return {
            "batch": p.batch,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "seqlen_q": p.seqlen_q,
            "seqlen_k": p.seqlen_k,
            **_band(p),
            **softmax_scalars(p.scale if p.score is None else 1.0, p.softcap),
            **({} if p.score is None else {"score_scale": p.scale}),
            **(_dropout(p.dropped) if p.dropped else {}),
            "total_q": p.lengths.total_q if isinstance(p.lengths, Packed) else 0,
            "total_k": min(p.lengths.total_k, MAX_SIZE) if isinstance(p.lengths, Packed) else 0,
            "alibi_stride": stride_of_sequences(arrays.get("alibi_slopes")),
        }

    def plan_lines(self, plan: Plan) -> list[str]:
        heads_per_tile = plan.config.block_q // plan.config.head_rows
        counts = [
            (schedule.visited * heads, schedule.total * heads)
            for part in plan.problem.parts
            if not part.problem.empty
            for heads in [part.problem.batch * part.problem.heads // heads_per_tile]
            for schedule in [plan.schedule_of(part.problem)]
        ]
        visited, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        known = "" if plan.problem.known else " at most: mask or lengths are on the GPU"
        tiles = (
            f"tiles      {plan.config}; {visited:,} of {total:,} visited, {total - visited:,} skipped{known}"
        )
        if plan.split is None:
            return [tiles]
        return [
            tiles,
            f"splits     {plan.split.kind}: the keys of each query block in {plan.split.count} splits",
        ]

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """Every element with every kind of mask, with and without a soft cap, with each entry of ``_OPTIONAL``."""
        for dtype, precision, mask, softcap in itertools.product(
            kernel.dtypes, kernel.precisions, _MASKS, (None, 30.0)
        ):
            if (dtype == "float32") != (precision == "native"):  # a precision is a choice for float32 only
                problem = Problem(
                    1, 1, 1, 1024, 1024, head_dim, dtype, mask, default_scale(head_dim), softcap
                )
                for optional in _OF_E4M3 if dtype == E4M3 else _OPTIONAL:
                    yield dataclasses.replace(
                        problem, precision=precision, operation=kernel.operation, **optional
                    )


class Forward(DenseOperation):
    name = "forward"
    title = "Forward"
    operands = (
        Operand("q", stride="q_stride", mapped=True),
        Operand("k", written=True, stride="k_stride", mapped=True),
        Operand("v", written=True, stride="v_stride", mapped=True),
        Operand("out", field="o", result=True, like="q", stride="o_stride", mapped=True),
        Operand("lse", result=True, like=lambda p: p.lse_shape, nothing=-math.inf),
    )
    optional_operands = (*PER_HEAD_AND_LENGTHS, *CACHE, *SCORE_ARRAYS, *RUNNING, SEED, *SCALES)
    params = Params("shared/params.cuh", "AttentionParams")
    running_params = Params("forward/running.cuh", "RunningParams")
    float8_params = Params("forward/float8_params.cuh", "Float8Params")
    scored_params = Params("shared/score_params.cuh", "ScoredParams")
    dropped_params = Params("shared/dropout_params.cuh", "DroppedParams")
    scored_dropped_params = Params("shared/dropout_params.cuh", "ScoredDroppedParams")
    cache_params = Params("forward/cache.cuh", "CacheParams")
    scored_cache_params = Params("forward/cache.cuh", "ScoredCacheParams")
    # Larger tiles than on a GPU amortise NumPy's call overhead, and 512 KiB of float32 scores fit a core's L2 cache.
    cpu_config = TileConfig(block_q=256, block_kv=512, num_warps=0)

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        own: dict[str, Any] = {
            "heads_per_head_batch": plan.heads_per_head_batch,
            "num_splits": plan.num_splits,
        }
        if plan.problem.running is not None:
            rows = dict(
                zip(("fresh_first", "fresh_end", "done_first", "done_end"), plan.problem.running, strict=True)
            )
            batch, head, _ = (x // 4 for x in arrays["running_lse"].strides)
            own |= rows | {"running_stride": strides_of(arrays["running"].strides, 4)}
            own |= {"lse_batch": batch, "lse_head": head}
        if cache := plan.problem.lengths.in_cache:
            table = arrays.get("block_table")
            own |= {"page_size": max(cache.page_size, 1), "num_pages": cache.num_pages}
            tree = arrays.get("tree")
            own["tree_tokens"] = 0 if tree is None else tree.shape[1]
            own["table_stride"] = 0 if table is None else table.strides[0] // 4
        return {**super().scalars(plan, arrays), **own}

    def params_of(self, problem: Problem) -> Params:
        if problem.dropped:
            return self.dropped_params if problem.score is None else self.scored_dropped_params
        if problem.score is not None:
            return self.scored_cache_params if problem.lengths.in_cache else self.scored_params
        if problem.running is not None:
            return self.running_params
        if problem.lengths.in_cache:
            return self.cache_params
        return self.float8_params if problem.scales else self.params

    def num_records(self, plan: Plan) -> int:
        return plan.config.query_items(plan.problem) * plan.num_splits


class Backward(DenseOperation):
    name = "backward"
    title = "Backward"
    operands = (
        Operand("dout", stride="dout_stride", mapped=True),
        Operand("q", stride="q_stride", mapped=True),
        Operand("k", stride="k_stride", mapped=True),
        Operand("v", stride="v_stride", mapped=True),
        Operand("out", field="o", stride="o_stride"),
        Operand("lse"),
        Operand("dlse"),
        Operand("dq", result=True, like="q", stride="dq_stride"),
        Operand("dk", result=True, like="k", stride="dk_stride", mapped=True),
        Operand("dv", result=True, like="v", stride="dv_stride", mapped=True),
    )
    optional_operands = (
        *PER_HEAD_AND_LENGTHS,
        *SCORE_ARRAYS,
        Operand("dsink", result=True, like=lambda p: (p.heads,)),
        *SCORE_GRADIENTS,
        SEED,
    )
    params = Params("backward/params.cuh", "BackwardParams")
    scored_params = Params("backward/params.cuh", "ScoredBackwardParams")
    dropped_params = Params("backward/params.cuh", "DroppedBackwardParams")
    scored_dropped_params = Params("backward/params.cuh", "ScoredDroppedBackwardParams")
    cpu_config = TileConfig(block_q=256, block_kv=256, num_warps=0)

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        p, config = plan.problem, plan.config
        found = {**super().scalars(plan, arrays), "scale": p.scale}
        if has_listed_tickets(p):
            return {**found, **listed_batches(p, -(-p.seqlen_k // config.block_kv)).scalars()}
        if not has_head_batches(p):
            return found
        # Persistent blocks never use small head batches.
        persistent = any(launch.persistent for launch in plan.launches)
        small = plan.device is not None and not persistent and has_small_head_batches(p, plan.device)
        blocks_of_head = -(-p.seqlen_k // config.block_kv) * config.blocks_of_item
        batches = head_batches(p, blocks_of_head, small).scalars()
        strips = p.group_size * -(-p.seqlen_q // config.block_q) * (config.block_q // STRIP)
        return {**found, **batches, "strips_per_head": strips}

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """As :meth:`DenseOperation.compiled`, with and without a fixed addition order."""
        for problem in super().compiled(kernel, head_dim):
            yield problem
            yield dataclasses.replace(problem, deterministic=True)

    def params_of(self, problem: Problem) -> Params:
        if problem.dropped:
            return self.dropped_params if problem.score is None else self.scored_dropped_params
        return self.params if problem.score is None else self.scored_params

    def num_records(self, plan: Plan) -> int:
        return plan.problem.key_blocks(plan.config.block_kv) * plan.problem.kv_heads


def _dropout(dropped: int) -> dict[str, int | float]:
    """The members of cuda_src/shared/dropout_params.cuh."""
    return {
        "zeros_low": sum(0x80 << 8 * k for k in range(4) if not dropped >> k & 1),
        "zeros_high": sum(0x80 << 8 * k for k in range(4) if not dropped >> 4 + k & 1),
        "kept_factor": kept_factor(dropped),
    }


def _whole(problem: Problem, device: Device, spec: Kernel, request: Request) -> Choice:
    """The choice without splits: ``spec`` with the caller's tiles, else with tuned tiles, else with its own choice."""
    if request.config is not None:
        return Choice(spec, request.config)
    fitting = serving_configs(spec, problem, device)
    chosen = spec.choose(problem, fitting, device)
    tuned = None if problem.lengths.in_cache else request.tuned.get(tuning_key(spec, problem))
    if tuned is not None and tuned.config in fitting and tuned.planned in (None, chosen):
        return Choice(spec, tuned.config, (f"tiles {tuned.config}: {tuned.found}",))
    known = (
        "measured on an H200 or H100 for other shapes: `cufa tune` measures this one"
        if device.arch.capability in _MEASURED
        else f"never measured on {device.arch.name}: `cufa tune` measures these tiles"
    )
    reason = f"tiles {chosen}: the registry's choice for head_dim {problem.dims_text} ({known})"
    return Choice(spec, chosen, (reason,))


def _band(p: Problem) -> dict[str, int]:
    """The band mask's first and last visible diagonal and its shift. For padded or packed sequences, the diagonals are
    relative to each sequence's own."""
    first, last = p.mask.edges(p.seqlen_q, p.seqlen_k) if p.mask.irregular_kind else p.edges
    if not p.lengths.ragged:
        # Clamp to the matrix: the mask stays the same, and sums stay within 32 bits.
        return {
            "band_first": -p.seqlen_q if first is None else min(max(first, -p.seqlen_q), p.seqlen_k),
            "band_last": p.seqlen_k if last is None else min(max(last, -p.seqlen_q), p.seqlen_k),
            "shift": p.mask.shift(p.seqlen_q, p.seqlen_k),
        }
    shift = p.mask.shift(0, 0)
    # An edge that hides nothing in the longest sequence hides nothing in any other: replace it with a distant one.
    from_diagonal = p.mask.edges(0, 0)
    left = -MAX_SIZE if first is None or from_diagonal[0] is None else from_diagonal[0] - shift
    right = MAX_SIZE if last is None or from_diagonal[1] is None else from_diagonal[1] - shift
    return {
        "band_first": max(left, -MAX_SIZE),
        "band_last": min(right, MAX_SIZE),
        "shift": shift,
        "shift_by_length": p.mask.shift(0, 1) - shift,
    }


FORWARD, BACKWARD = Forward(), Backward()
OPERATIONS.update({FORWARD.name: FORWARD, BACKWARD.name: BACKWARD})
