"""Decode cases as kernels take them: operands, the problem, a plan for one kernel of the registry."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decode_support import Case

from cufa.calls import arrays
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig, kernels_of
from cufa.kernels.decode import DecodeConfig, row_blocks
from cufa.plan.decode import ragged_shares
from cufa.plan.operation import PER_HEAD
from cufa.plan.planner import Plan, fitting_configs, make_plan
from cufa.problem.element import ELEMENTS
from cufa.problem.float8 import cache_scale_shapes
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, Mask
from cufa.problem.problem import Problem
from cufa.schedule.decode import WAVES, balanced_shares, split_range, used_splits

H200 = Device.typical("sm_90")

NAMES = (
    "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale", "out", "lse"
)  # fmt: skip


def merged_by_a_launch(config: DecodeConfig) -> DecodeConfig:
    """The same tiles with the merge as a launch of its own."""
    return dataclasses.replace(config, fold_combine=False, cluster_merge=False)


def operands_of(case: Case, place: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
    """Fresh copies of the caches; out and lse are NaN."""
    given: dict[str, Any] = dict.fromkeys(NAMES)
    given |= {name: x for name, x in case.options.items() if name in NAMES}
    given |= {name: given[name].copy() for name in ("k_scale", "v_scale") if case.fine}
    given |= {"q": case.q, "k_cache": case.k_cache.copy(), "v_cache": case.v_cache.copy()}
    given["out"] = np.full(case.q.shape, np.nan, case.q.dtype)
    given["lse"] = np.full(case.q.shape[:3], np.nan, np.float32)
    few = {x.name: case.options.get(x.name) for x in PER_HEAD}
    given |= few if any(x is not None for x in few.values()) else {}
    return {name: None if x is None else place(x) for name, x in given.items()}


def problem_of(case: Case, mask: Mask = CAUSAL, softcap: float | None = None) -> Problem:
    batch, heads, tokens, head_dim = case.q.shape
    outer, kv_heads, length, _ = case.k_cache.shape
    table, new = case.options.get("block_table"), case.options.get("k_new")
    k_dtype = "float8_e4m3" if case.k_cache.dtype == np.uint8 else str(case.q.dtype)
    read = [case.q, case.k_cache, case.v_cache] + ([] if new is None else [new, case.options["v_new"]])
    lengths = Cached(
        page_size=0 if table is None else length,
        max_pages=0 if table is None else table.shape[1],
        num_pages=0 if table is None else outer,
        given=case.options["cache_seqlens"] is not None,
        new_tokens=0 if new is None else new.shape[2],
        quantize_new=case.fine and new is not None,
    )
    scales = cache_scale_shapes(case.k_cache.shape, table is not None, head_dim)
    modes = [
        mode for mode, (shape, _) in scales.items() if case.fine and shape == case.options["k_scale"].shape
    ]
    return Problem(
        batch, heads, kv_heads, tokens, length if table is None else table.shape[1] * length, head_dim,
        str(case.q.dtype), mask, 1 / math.sqrt(head_dim), softcap,
        lengths=lengths,
        k_dtype=k_dtype,
        v_dtype=k_dtype,
        operation="decode",
        alibi="alibi_slopes" in case.options,
        sink="sink" in case.options,
        softmax_max=case.options.get("softmax_max", ""),
        scales=("", *2 * modes[:1]) if modes else (),
        alignment=math.gcd(arrays.alignment(*read), head_dim * ELEMENTS[k_dtype].itemsize),
    )  # fmt: skip


def plan_of(
    case: Case, kernel: str, num_splits: int | None = None, config: TileConfig | None = None,
    device: Device = H200, **how: Any,
) -> Plan:  # fmt: skip
    """``how``: mask and softcap of the problem."""
    return make_plan(problem_of(case, **how), device, num_splits=num_splits, config=config, kernel=kernel)


def cache_of(kernel: str) -> bool | str:
    """``fp8`` of make_case for a kernel."""
    return "token" if "scaled" in kernel else "fp8" in kernel


def splits(kernel: str, number: int) -> int:
    """What to ask for to get this many: of shares of a ragged batch, an eighth is used at least."""
    return number * WAVES if "balanced" in kernel else number


def configs(kernel: str, head_dim: int, device: Device = H200) -> tuple[TileConfig, ...]:
    return fitting_configs(kernels_of("decode")[kernel], head_dim, device)


def served(device: Device, kernel: str, head_dim: int) -> tuple[TileConfig, ...]:
    """Configs of a kernel; skips the test where a GPU has none."""
    if not kernels_of("decode")[kernel].runs_on(device.arch.capability):
        pytest.skip(f"{kernel} does not run on {device.arch.name}")
    fitting = configs(kernel, head_dim, device)
    if not fitting:
        pytest.skip(f"no config of {kernel} fits head_dim {head_dim}")
    return fitting


def assert_spans(plan: Plan, lengths: list[int], records: np.ndarray) -> None:
    """One record per span, saying what cufa.schedule.decode says."""
    keys, problem, expected = plan.config.block_kv, plan.problem, []
    blocks = row_blocks(problem, plan.config)

    def tiles(first: int, last: int) -> tuple[int, int]:
        """The first, and how many."""
        return first // keys, max(1, -(-last // keys) - first // keys)

    assert plan.split is not None
    if plan.split.kind == "balanced":
        parts: dict[tuple[int, int], int] = {}
        for span in balanced_shares(
            lengths, problem.kv_heads, plan.split.count, keys, blocks, ragged=ragged_shares(plan),
            min_shares=plan.split.least, reach=problem.kernel_reach,
        ):  # fmt: skip
            item = span.batch, span.kv_head * blocks + span.row_block
            part = parts[item] = parts.get(item, -1) + 1
            expected.append((*item, part, *tiles(span.first_key, span.last_key), span.share))
    else:
        for b, n in enumerate(lengths):
            for item in range(problem.kv_heads * blocks):
                for split in range(used_splits(n, plan.split.count, keys, problem.kernel_reach)):
                    first, last = split_range(n, plan.split.count, split, keys, problem.kernel_reach)
                    block = split + plan.split.count * (item + problem.kv_heads * blocks * b)
                    expected.append((b, item, split, *tiles(first, last), block))
    got = records[["batch", "head", "q_block", "first_tile", "tiles_visited", "thread_block"]].tolist()
    assert got == sorted(expected)
