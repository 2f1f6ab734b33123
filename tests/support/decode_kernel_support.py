"""Decode cases as kernels take them: operands, a plan for one kernel of the registry, the spans of its blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decode_support import Case, prepare

from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig, kernels_of
from cufa.kernels.decode import DecodeConfig, row_blocks
from cufa.plan.decode import ragged_shares
from cufa.plan.planner import Plan, fitting_configs, make_plan
from cufa.schedule.decode import WAVES, balanced_shares, split_range, used_splits

H200 = Device.typical("sm_90")


def merged_by_a_launch(config: DecodeConfig) -> DecodeConfig:
    """The same tiles with the merge as a launch of its own."""
    return dataclasses.replace(config, fold_combine=False, cluster_merge=False)


def operands_of(case: Case, place: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
    """Fresh copies of the caches; out and lse are NaN."""
    return prepare(case, on_gpu=True, place=place)[1]


def plan_of(
    case: Case, kernel: str, num_splits: int | None = None, config: TileConfig | None = None,
    device: Device = H200,
) -> Plan:  # fmt: skip
    problem, _ = prepare(case, on_gpu=True)
    return make_plan(problem, device, num_splits=num_splits, config=config, kernel=kernel)


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
    reaches = [problem.kernel_reach_of(b) for b in range(len(lengths))]

    def tiles(first: int, last: int) -> tuple[int, int]:
        """The first, and how many."""
        return first // keys, max(1, -(-last // keys) - first // keys)

    assert plan.split is not None
    if plan.split.kind == "balanced":
        parts: dict[tuple[int, int], int] = {}
        for span in balanced_shares(
            lengths, problem.kv_heads, plan.split.count, keys, blocks, ragged=ragged_shares(plan),
            min_shares=plan.split.least, reach=reaches,
        ):  # fmt: skip
            item = span.batch, span.kv_head * blocks + span.row_block
            part = parts[item] = parts.get(item, -1) + 1
            expected.append((*item, part, *tiles(span.first_key, span.last_key), span.share))
    else:
        for b, n in enumerate(lengths):
            for item in range(problem.kv_heads * blocks):
                for split in range(used_splits(n, plan.split.count, keys, reaches[b])):
                    first, last = split_range(n, plan.split.count, split, keys, reaches[b])
                    block = split + plan.split.count * (item + problem.kv_heads * blocks * b)
                    expected.append((b, item, split, *tiles(first, last), block))
    got = records[["batch", "head", "q_block", "first_tile", "tiles_visited", "thread_block"]].tolist()
    assert got == sorted(expected)
