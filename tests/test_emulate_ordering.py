"""Every call of FlashAttention-3 and of the decode kernels that only orders (commit, wait, fence, barrier,
griddepcontrol) is taken out, one at a time: checked mode finds each, or says that it cannot and why."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from decode_kernel_support import configs, operands_of, plan_of, splits
from decode_support import make_case
from support import forward_operands, make_inputs, make_problem, plan_with_blocks

from cufa.core.mask import Band
from cufa.executor.emulate import EmulationError, Execution, Finding, run_plan
from cufa.kernels import KERNELS, TileConfig
from cufa.kernels.decode import merged_in_cluster, without_fold
from cufa.nvrtc import compiler

SCHEDULES = ("ascending", "descending", 1)

#: What a GPU, the copy engine or another thread goes by. (mma_fence is for this executor alone.)
_ORDERING = re.compile(
    r"\b(?:block_sync|warp_sync|ring_sync|bar_sync|bar_arrive|cluster_arrive|cluster_arrive_relaxed|cluster_wait|"
    r"cp_async_commit|cp_async_wait<[^;(]*>|bulk_commit|bulk_wait_read|async_proxy_fence|"
    r"mbarrier_init_fence|mbarrier_arrive|mbarrier_arrive_expect_tx|mbarrier_wait|mbarrier_wait_cluster|"
    r"wgmma_fence|wgmma_commit|wgmma_wait<[^;(]*>|grid_await_previous|grid_release_next)\([^;{}]*\);"
)


def fa3(
    config: TileConfig, *, head_dim: int, lengths=(200, 130), softcap=None, **mask
) -> Callable[..., object]:
    """Several short items in one block: the pipeline runs on from item to item."""

    def run(schedule):
        q, k, v = make_inputs(1, 3, 1, *lengths, head_dim, "float16")
        problem = dataclasses.replace(make_problem(q, k, v, **mask), softcap=softcap)
        plan = plan_with_blocks(problem, config, 1)
        return run_plan(plan, forward_operands(q, k, v), Execution("checked", schedule), trace=False)

    return run


def decode(
    kernel: str, number: int, change=lambda config: config, which: int = 0, **case
) -> Callable[..., object]:
    def run(schedule):
        made = make_case(**{"lengths": [150, 3, 200], "head_dim": 64, **case})
        config = change(configs(kernel, made.q.shape[3])[which])
        plan = plan_of(made, kernel, splits(kernel, number), config)
        return run_plan(plan, operands_of(made), Execution("checked", schedule), trace=False)

    return run


def _fa3_runs() -> Iterator[Callable[..., object]]:
    fitting = KERNELS["fa3_forward"].configs
    at_128 = [config for config in fitting if config.fits(128)]
    for config in [*at_128, *(c for c in fitting if c.fits(64)), *(c for c in fitting if c.fits(256))]:
        head_dim = 128 if config.fits(128) else config.max_head_dim
        yield fa3(config, head_dim=head_dim, causal=False)
    yield fa3(at_128[0], head_dim=128, causal=True)
    yield fa3(at_128[0], head_dim=128, causal=False, softcap=5.0)
    yield fa3(at_128[0], head_dim=128, mask=Band(left=20, right=5), lengths=(330, 330))


def _decode_runs() -> Iterator[Callable[..., object]]:
    pages = {"tokens": 3, "new": 2, "page_size": 16}
    yield decode("decode_split_tma", 3, **pages)
    yield decode("decode_split_tma", 3, merged_in_cluster, **pages)
    yield decode("decode_split_tma", 3, without_fold, **pages)
    yield decode("decode_balanced_tma", 4, **pages)
    yield decode("decode_balanced_tma", 4, without_fold, **pages)
    yield decode("decode_balanced_tma", 2, which=-1, lengths=[150, 0, 90], heads=40, kv_heads=1)
    yield decode("decode_balanced", 4, head_dim=72, new=1, page_size=3)
    yield decode("decode_split", 2, heads=40, kv_heads=1, which=-1)


FAMILIES = {
    "fa3": (
        ["kernels/fa3_forward.cu", *(f"tiles/{x}.cuh" for x in ("consumer", "pipeline", "pipeline_memory"))],
        list(_fa3_runs()),
    ),
    "decode": (
        [
            "kernels/decode_split.cu", "kernels/decode_balanced.cu",
            *(f"tiles/decode_{x}.cuh" for x in ("block", "cluster", "merge", "schedule", "stream", "tma")),
        ],
        list(_decode_runs()),
    ),
}  # fmt: skip


def calls(file: str) -> list[re.Match[str]]:
    """Not those of trace builds, nor in comments, nor definitions."""
    text = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8")
    found = []
    for match in _ORDERING.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        traced = text[: text.rfind("\n", 0, match.start())].rstrip().endswith("if constexpr (TRACE) {")
        if "//" not in line and not traced:
            found.append(match)
    return found


CALLS = [
    pytest.param(family, file, i, id=f"{file.partition('/')[2]}:{i}-{match[0].partition('(')[0]}")
    for family, (files, _) in FAMILIES.items()
    for file in files
    for i, match in enumerate(calls(file))
]


def found_by(run: Callable[..., object], schedule) -> tuple[Finding, ...]:
    try:
        return run(schedule).findings
    except EmulationError as error:
        return error.findings


@pytest.mark.parametrize(("family", "file", "i"), CALLS)
def test_a_call_that_is_left_out_is_found(tmp_path: Path, monkeypatch, family, file, i):
    call = calls(file)[i]
    copy = tmp_path / "cuda_src"
    shutil.copytree(compiler.SOURCE_DIR, copy)
    source = copy / file
    text = source.read_text(encoding="utf-8")
    source.write_text(text[: call.start()] + ";" + text[call.end() :], encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCE_DIR", copy)
    for n, run in enumerate(FAMILIES[family][1]):
        for schedule in SCHEDULES:
            if found := found_by(run, schedule):
                print(
                    f"SURVEY {file}:{call.string.count(chr(10), 0, call.start()) + 1} {call[0]} run {n} {schedule} {sorted({f.kind for f in found})}"
                )
                return
    line = call.string.count("\n", 0, call.start()) + 1
    pytest.fail(f"line {line}: nothing found without {call[0]}")


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_found_in_the_kernels_as_they_are(family):
    for run in FAMILIES[family][1]:
        for schedule in SCHEDULES:
            assert found_by(run, schedule) == ()
