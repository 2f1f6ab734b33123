"""Decoding as an operation: operands, scalars of its kernels, what is compiled, who chooses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..gpu.architectures import Device
from ..kernels import Kernel
from ..kernels.decode import row_blocks
from ..kernels.params import Params, softmax_scalars
from ..problem.lengths import Cached
from ..problem.mask import CAUSAL, Band
from ..problem.problem import Problem, default_scale
from ..schedule.decode import num_tiles
from ..schedule.schedule import used_of
from . import decode
from .operation import PER_HEAD, Arrays, Choice, Operand, Operation, Request, register, stride_of_sequences

if TYPE_CHECKING:
    from .planner import Plan

#: Query tokens, and what they see: one of each kind of mask.
_MASKS = ((1, CAUSAL), (4, CAUSAL), (1, Band(255, 0)), (4, Band(255, 0, keep=4)))

#: No optional operand, and all.
_OPTIONAL: tuple[dict[str, Any], ...] = ({}, {"alibi": True, "sink": True})

#: Caches that differ in what is compiled: contiguous or in pages, full or of given lengths, appended to or not.
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
        Operand("k_scale"),
        Operand("v_scale"),
        Operand("out", field="o", result=True, like="q", stride="o_stride"),
        Operand("lse", result=True, like=lambda p: p.lse_shape, nothing=-math.inf),
    )
    optional_operands = PER_HEAD
    params = Params("decode/params.cuh", "DecodeParams")
    cpu_config = decode.CPU_CONFIG
    splits = True
    memory_bound = True

    def choose(
        self, problem: Problem, device: Device | None, serving: list[Kernel], request: Request
    ) -> Choice:
        return decode.choose(problem, device, serving, request)

    def cpu_kernel(self, named: list[Kernel]) -> Kernel:
        return decode.cpu_spec(named)

    def plan_lines(self, plan: Plan) -> list[str]:
        return decode.plan_lines(plan)

    def num_records(self, plan: Plan) -> int:
        return decode.num_records(plan)

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        p = plan.problem
        assert plan.split is not None
        first, _ = p.mask.edges(p.seqlen_q, p.seqlen_k) if p.mask.beyond_band else p.edges
        tiles = num_tiles(p.seqlen_k, plan.config.block_kv, p.kernel_reach)
        assert p.first_keys is not None
        keep, prefix = p.first_keys
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
            "keep": keep,
            "prefix": prefix,
            "alibi_stride": stride_of_sequences(slopes),
            **softmax_scalars(p.scale, p.softcap),
        }

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """Every element with every kind of mask (several tokens see different keys), cap and cache, with what few calls
        have and without."""
        for dtype, (tokens, mask), softcap, lengths, optional in itertools.product(
            kernel.dtypes, _MASKS, (None, 30.0), _CACHES, _OPTIONAL
        ):
            problem = Problem(
                1,
                8,
                1,
                tokens,
                1024,
                head_dim,
                dtype,
                mask,
                default_scale(head_dim),
                softcap,
                lengths=lengths,
            )
            for k_dtype in kernel.k_dtypes or (None,):
                yield dataclasses.replace(
                    problem, k_dtype=k_dtype, v_dtype=k_dtype, operation="decode", **optional
                )


DECODE = Decode()
register(DECODE)
