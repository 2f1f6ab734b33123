"""Decoding as an operation: operands, scalars of its kernels, what is compiled, who chooses, who computes on CPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from ..build.params import Params, softmax_scalars
from ..kernels import KernelSpec
from ..kernels.decode import row_blocks
from ..plan.decode import CPU_CONFIG, choose, cpu_spec, num_records, plan_lines
from ..plan.operation import Arrays, Operand, Operation, register
from ..plan.planner import Plan
from ..problem.lengths import Cached
from ..problem.mask import CAUSAL, Band
from ..problem.problem import Problem, default_scale
from ..reference.decode import decode_reference
from ..schedule.decode import num_tiles, used_of
from . import calls
from . import optional_operands as further


def _run_on_cpu(plan: Plan, given: Arrays) -> None:
    from ..run.cpu import decode as cpu_decode

    cpu_decode.run(plan, given)


def _scalars(plan: Plan, given: Arrays) -> dict[str, int | float]:
    p = plan.problem
    assert plan.split is not None
    first, _ = p.mask.edges(p.seqlen_q, p.seqlen_k) if p.mask.beyond_band else p.edges
    tiles = num_tiles(p.seqlen_k, plan.config.block_kv, p.kernel_reach)
    assert p.first_keys is not None
    keep, prefix = p.first_keys
    table, slopes = given["block_table"], given.get("alibi_slopes")
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
        "alibi_stride": further.stride_of_sequences(slopes),
        **softmax_scalars(p.scale, p.softcap),
    }


def _io_bytes(p: Problem) -> int:
    """Keys and values that some query sees, q and o once each."""
    queries = p.batch * p.heads * p.seqlen_q * p.head_dim
    return p.kv_bytes() + queries * (p.q_element.itemsize + p.out_element.itemsize)


def _describe(p: Problem) -> str:
    tokens = f", {p.seqlen_q} tokens" if p.seqlen_q > 1 else ""
    cache = f" in pages of {p.cache.page_size}" if p.cache.paged else ""
    appended = f", {p.cache.new_tokens} appended" if p.cache.new_tokens else ""
    dtype = p.dtype if p.k_element is p.q_element else f"{p.dtype} over {p.k_element.name}"
    upto = "up to " if p.lengths.ragged else ""
    plain = p.mask == CAUSAL and p.softcap is None and not (p.alibi or p.sink)
    scores = "" if plain else f", {p.scores_text}"
    return (
        f"decode batch {p.batch}, heads {p.heads_text}{tokens}, {upto}{p.seqlen_k:,} cached{cache}"
        f"{appended}, head_dim {p.head_dim}, {dtype}{scores}"
    )


#: Query tokens, and what they see: one of each kind of mask.
_MASKS = ((1, CAUSAL), (4, CAUSAL), (1, Band(255, 0)), (4, Band(255, 0, keep=4)))

#: What few calls have: nothing of it, and all.
_FEW: tuple[dict[str, Any], ...] = ({}, {"alibi": True, "sink": True})

#: Caches that differ in what is compiled: contiguous or in pages, full or of given lengths, appended to or not.
_CACHES = tuple(
    dataclasses.replace(place, given=given, new_tokens=new_tokens)
    for place in (Cached(page_size=64, max_pages=16, num_pages=16), Cached())
    for given, new_tokens in ((True, 0), (True, 1), (False, 0))
)


def _compiled(spec: KernelSpec, head_dim: int) -> Iterator[Problem]:
    """Every element with every kind of mask (several tokens see different keys), cap and cache, with what few calls
    have and without."""
    for dtype, (tokens, mask), softcap, lengths, few in itertools.product(
        spec.dtypes, _MASKS, (None, 30.0), _CACHES, _FEW
    ):
        problem = Problem(
            1, 8, 1, tokens, 1024, head_dim, dtype, mask, default_scale(head_dim), softcap, lengths=lengths
        )
        for k_dtype in spec.k_dtypes or (None,):
            yield dataclasses.replace(problem, k_dtype=k_dtype, v_dtype=k_dtype, operation="decode", **few)


DECODE = register(
    Operation(
        name="decode",
        title="Decode",
        operands=(
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
            Operand("lse", result=True, like=calls.lse_shape, nothing=-math.inf),
        ),
        further=further.OF_HEADS,
        params=Params("decode/params.cuh", "DecodeParams"),
        scalars=_scalars,
        choose=choose,
        cpu_spec=cpu_spec,
        cpu_config=CPU_CONFIG,
        run_on_cpu=_run_on_cpu,
        reference=decode_reference,
        flops=lambda p: 4 * p.head_dim * p.all_visible_scores,
        io_bytes=_io_bytes,
        describe=_describe,
        plan_lines=plan_lines,
        compiled=_compiled,
        num_records=num_records,
        splits=True,
        memory_bound=True,
    )
)
