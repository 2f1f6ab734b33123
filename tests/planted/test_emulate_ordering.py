"""Every call of FlashAttention-3 and of the decode kernels that only orders (commit, wait, fence, barrier,
griddepcontrol) is taken out, one at a time: checked mode finds each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changed_sources import with_changed
from decode_kernel_support import configs, operands_of, plan_of, splits
from decode_support import make_case
from support import forward_operands, make_inputs, make_problem, plan_with_blocks

from cufa import masks
from cufa.build import compiler
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.problem.mask import Band
from cufa.reference.dense import attention_reference
from cufa.run.emulate.calls import (
    Emulation,
    EmulationError,
    Execution,
    Finding,
    emulate,
    emulate_backward,
    run_plan,
)

Run = Callable[[str | int], Emulation]

#: What a GPU, the copy engine or another thread goes by. (mma_fence is for this executor alone.)
_ORDERING = re.compile(
    r"\b(?:block_sync|warp_sync|ring_sync|bar_sync|bar_arrive|cluster_arrive|cluster_arrive_relaxed|cluster_wait|"
    r"cp_async_commit|cp_async_wait<[^;(]*>|bulk_commit|bulk_wait_read|async_proxy_fence|"
    r"mbarrier_init_fence|mbarrier_arrive|mbarrier_arrive_expect_tx|mbarrier_wait|mbarrier_wait_cluster|"
    r"wgmma_fence|wgmma_commit|wgmma_wait<[^;(]*>|grid_await_previous|grid_release_next)\([^;{}]*\);"
)


def fa3(which: int, head_dim: int, lengths=(200, 130), softcap: float | None = None, **mask: Any) -> Run:
    """By the head dim's config of this number. Several short items in one block: the pipeline runs on from item to
    item."""
    config = [config for config in KERNELS["fa3_forward"].configs if config.fits(head_dim)][which]

    def run(schedule: str | int) -> Emulation:
        q, k, v = make_inputs(1, 3, 1, *lengths, head_dim, "float16")
        problem = make_problem(q, k, v, **(mask or {"causal": False}))
        plan = plan_with_blocks(dataclasses.replace(problem, softcap=softcap), config, 1)
        return run_plan(plan, forward_operands(q, k, v), Execution("checked", schedule), trace=False)

    return run


def fa3_split(number: int, heads: int = 1, lengths=(70, 700)) -> Run:
    """The keys of each query block in so many splits, and the launch that merges them. Heads that share keys share a
    tile, where their queries are few."""
    spec, sm_90 = KERNELS["fa3_forward"], Device.typical(90)
    config = next(
        config for config in spec.fitting(spec.split_configs, 128, sm_90) if config.packed_heads == heads
    )

    def run(schedule: str | int) -> Emulation:
        q, k, v = make_inputs(1, heads, 1, *lengths, 128, "float16")
        options = {"algorithm": "fa3", "num_splits": number, "arch": "sm_90", "config": config}
        return emulate(q, k, v, **options, mode="checked", schedule=schedule, trace=False)

    return run


def fa3_backward(head_dim: int) -> Run:
    def run(schedule: str | int) -> Emulation:
        q, k, v = make_inputs(1, 2, 1, 200, 300, head_dim, "float16")
        out, lse = attention_reference(q, k, v, return_lse=True)
        forward = q, q, k, v, out.astype(q.dtype), lse.astype("float32")
        return emulate_backward(*forward, algorithm="fa3", mode="checked", schedule=schedule, trace=False)

    return run


def decode(
    kernel: str, number: int, which: int = 0, merge: dict[str, bool] | None = None, **case: Any
) -> Run:
    def run(schedule: str | int) -> Emulation:
        made = make_case(**{"lengths": [150, 3, 200], "head_dim": 64, **case})
        config = dataclasses.replace(configs(kernel, made.q.shape[3])[which], **(merge or {}))
        plan = plan_of(made, kernel, splits(kernel, number), config)
        return run_plan(plan, operands_of(made), Execution("checked", schedule), trace=False)

    return run


_PAGES = {"tokens": 3, "new": 2, "page_size": 16}
_BY_CLUSTER, _BY_LAUNCH = {"fold_combine": False, "cluster_merge": True}, {"fold_combine": False}
#: 40 rows: two warps share a ring.
_MANY_ROWS = {"heads": 40, "kv_heads": 1}

RUNS: dict[str, Run] = {
    "fa3 d128, Q in registers": fa3(0, 128),
    "fa3 d128, two stages of Q": fa3(1, 128),
    "fa3 d128, one consumer": fa3(2, 128),
    "fa3 d64, three consumers": fa3(0, 64),
    "fa3 d256, O from registers": fa3(0, 256),
    "fa3 causal": fa3(0, 128, causal=True),
    "fa3 softcap": fa3(0, 128, softcap=5.0),
    "fa3 window": fa3(0, 128, lengths=(330, 330), mask=Band(left=20, right=5)),
    "fa3 documents": fa3(2, 128, lengths=(200, 200), mask=masks.documents([90, 60, 50])),
    #: Only where keys are split does a launch follow, so that nothing else misses grid_release_next.
    "fa3 split": fa3_split(3),
    "fa3 split, heads in one tile": fa3_split(3, heads=2, lengths=(20, 700)),
    "fa3 backward": fa3_backward(64),
    "split": decode("decode_split_tma", 3, **_PAGES),
    "split, merged in clusters": decode("decode_split_tma", 3, merge=_BY_CLUSTER, **_PAGES),
    "split, merged by a launch": decode("decode_split_tma", 3, merge=_BY_LAUNCH, **_PAGES),
    "split, many rows by cp.async": decode("decode_split", 2, which=-1, **_MANY_ROWS),
    "balanced": decode("decode_balanced_tma", 4, **_PAGES),
    "balanced, merged by a launch": decode("decode_balanced_tma", 4, merge=_BY_LAUNCH, **_PAGES),
    "balanced, many rows": decode("decode_balanced_tma", 2, which=-1, lengths=[150, 0, 90], **_MANY_ROWS),
    "balanced by cp.async": decode("decode_balanced", 4, head_dim=72, new=1, page_size=3),
}

_FA3 = [name for name in RUNS if name.startswith("fa3")]
_DECODE = [name for name in RUNS if name not in _FA3]

#: File → the run that shows most of it; then all others of its kernel.
FILES = {
    "forward/fa3/kernel.cu": _FA3[0],
    "forward/fa3/consumer.cuh": _FA3[0],
    "forward/fa3/consumer_items.cuh": _FA3[0],
    "forward/fa3/tiles.cuh": "fa3 documents",
    "forward/fa3/producer.cuh": _FA3[0],
    "wgmma/pipeline.cuh": _FA3[0],
    "forward/fa3/memory.cuh": _FA3[0],
    "decode/split.cu": "split, merged by a launch",
    "decode/balanced.cu": "balanced, merged by a launch",
    "decode/block.cuh": "balanced",
    "decode/cluster.cuh": "split, merged in clusters",
    "decode/merge.cuh": "split",
    "decode/schedule.cuh": "balanced",
    "decode/stream.cuh": "balanced by cp.async",
    "decode/tma.cuh": "balanced",
}

#: What orders nothing: by file and call, why.
SUPERFLUOUS = {
    (
        "decode/block.cuh",
        "cp_async_wait<0>();",
    ): "the groups of copies that are in flight then are empty",
}


def calls(file: str) -> list[re.Match[str]]:
    """Not those of trace builds, nor in comments, nor definitions."""
    text = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8")
    found = []
    for match in _ORDERING.finditer(text):
        before, line = text[: match.start()].rpartition("\n")[::2]
        if "//" not in line and not before.rstrip().endswith("if constexpr (TRACE) {"):
            found.append(match)
    return found


CALLS = [
    pytest.param(file, i, id=f"{file.partition('/')[2]}:{i}-{match[0].partition('(')[0]}")
    for file in FILES
    for i, match in enumerate(calls(file))
]


def found_by(run: Run, schedule: str | int = "ascending") -> tuple[Finding, ...]:
    try:
        return run(schedule).findings
    except EmulationError as error:
        return error.findings


@pytest.mark.sampled(fixed=3, dated=1)
@pytest.mark.parametrize(("file", "i"), CALLS)
def test_a_call_that_is_left_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, i: int):
    call = calls(file)[i]
    without = call.string[: call.start()] + ";" + call.string[call.end() :]
    monkeypatch.setattr(compiler, "SOURCE_DIR", with_changed(tmp_path, file, lambda _: without))
    kernel = _FA3 if FILES[file] in _FA3 else _DECODE
    found = any(found_by(RUNS[name]) for name in dict.fromkeys([FILES[file], *kernel]))
    line = call.string.count("\n", 0, call.start()) + 1
    why = SUPERFLUOUS.get((file, call[0]))
    assert found == (why is None), (
        f"{file}:{line}: {call[0]} is {'needed' if found else 'left out, and nothing found'}"
    )


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found_in_the_kernels_as_they_are(name: str):
    for schedule in ("ascending", "descending", 1):
        assert found_by(RUNS[name], schedule) == ()
