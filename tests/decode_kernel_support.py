"""Decode cases as kernels take them: operands, the problem, a plan for one kernel of the registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from decode_support import Case

from cufa.core.architectures import Device
from cufa.decode.operands import DecodeOperands
from cufa.decode.plan import DecodePlan, make_decode_plan
from cufa.decode.problem import CACHE_ITEMSIZE, DecodeProblem
from cufa.decode.schedule import WAVES, balanced_shares, split_range, used_splits
from cufa.kernels import DECODE_KERNELS, TileConfig
from cufa.ops import arrays
from cufa.planner import fitting_configs

H200 = Device.typical("sm_90")


def operands_of(case: Case, place: Callable[[Any], Any] = np.asarray) -> DecodeOperands:
    """Fresh copies of the caches; out and lse are NaN."""
    given = {name: None if x is None else place(x) for name, x in case.options.items() if name != "scale"}
    out = np.full(case.q.shape, np.nan, case.q.dtype)
    lse = np.full(case.q.shape[:3], np.nan, np.float32)
    return DecodeOperands(
        place(case.q), place(case.k_cache.copy()), place(case.v_cache.copy()), place(out), lse=place(lse),
        **given,
    )  # fmt: skip


def problem_of(case: Case) -> DecodeProblem:
    batch, heads, tokens, head_dim = case.q.shape
    outer, kv_heads, length, _ = case.k_cache.shape
    table, new = case.options.get("block_table"), case.options.get("k_new")
    cache_dtype = "float8_e4m3" if case.k_cache.dtype == np.uint8 else str(case.q.dtype)
    read = [case.q, case.k_cache, case.v_cache] + ([] if new is None else [new, case.options["v_new"]])
    return DecodeProblem(
        batch, heads, kv_heads, tokens, length if table is None else table.shape[1] * length, head_dim,
        str(case.q.dtype), cache_dtype, 1 / math.sqrt(head_dim),
        page_size=0 if table is None else length,
        max_pages=0 if table is None else table.shape[1],
        num_pages=0 if table is None else outer,
        ragged=True,
        new_tokens=0 if new is None else new.shape[2],
        alignment=math.gcd(arrays.alignment(*read), head_dim * CACHE_ITEMSIZE[cache_dtype]),
    )  # fmt: skip


def plan_of(
    case: Case, kernel: str, num_splits: int | None = None, config: TileConfig | None = None,
    device: Device = H200,
) -> DecodePlan:  # fmt: skip
    return make_decode_plan(problem_of(case), device, num_splits, config=config, kernel=kernel)


def splits(kernel: str, number: int) -> int:
    """What to ask for to get this many: of shares of a ragged batch, an eighth is used at least."""
    return number * WAVES if "balanced" in kernel else number


def configs(kernel: str, head_dim: int, device: Device = H200) -> tuple[TileConfig, ...]:
    return fitting_configs(DECODE_KERNELS[kernel], head_dim, device)


def assert_pieces(plan: DecodePlan, lengths: list[int], records: np.ndarray) -> None:
    """One record a piece, saying what cufa.decode.schedule says."""
    keys, problem, expected = plan.config.block_kv, plan.problem, []
    if plan.schedule == "balanced":
        parts: dict[tuple[int, int], int] = {}
        for piece in balanced_shares(
            lengths, problem.kv_heads, plan.num_splits, keys, plan.row_blocks, ragged=plan.ragged_shares
        ):
            item = piece.batch, piece.kv_head * plan.row_blocks + piece.row_block
            part = parts[item] = parts.get(item, -1) + 1
            tiles = max(1, -(-(piece.last_key - piece.first_key) // keys))
            expected.append((*item, part, tiles, piece.share))
    else:
        for b, n in enumerate(lengths):
            for item in range(problem.kv_heads * plan.row_blocks):
                for split in range(used_splits(n, plan.num_splits, keys)):
                    first, last = split_range(n, plan.num_splits, split, keys)
                    block = split + plan.num_splits * (item + problem.kv_heads * plan.row_blocks * b)
                    expected.append((b, item, split, max(1, -(-(last - first) // keys)), block))
    got = records[["batch", "head", "q_block", "tiles_visited", "thread_block"]].tolist()
    assert got == sorted(expected)
