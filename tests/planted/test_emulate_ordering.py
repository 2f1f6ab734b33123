"""Each barrier, wait, fence and commit of the kernels is left out, one at a time: checked mode finds each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial

import pytest
from bugs_backward import ALONE, ALONE_F32, SHARED, SHARED_F32
from fa3_support import execute_on_blocks
from planted_runs import BY_CLUSTER, BY_LAUNCH, MANY_ROWS, PAGES, backward, decoding, forward, kinds_of
from sampling import of_today
from support import make_inputs

from cufa import masks
from cufa.build import compiler
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import FULL, Band, Mask
from cufa.problem.problem import BAND_KINDS
from cufa.run.emulate.calls import Execution

#: mma_fence is not here: it orders nothing on a GPU.
_ORDERING = re.compile(
    r"\b(?:block_sync|warp_sync|ring_sync|group\.sync|bar_sync|bar_arrive|cluster_arrive|cluster_arrive_relaxed|"
    r"cluster_wait|cp_async_commit|cp_async_wait<[^;(>]*>|bulk_commit|bulk_wait_read|async_proxy_fence|"
    r"mbarrier_init_fence|mbarrier_arrive|mbarrier_arrive_expect_tx|mbarrier_wait|mbarrier_wait_cluster|"
    r"wgmma_fence|wgmma_commit|wgmma_wait<[^;(]*>|grid_await_previous|grid_release_next)\([^;{}]*\);"
)
SM_90, FA3 = Device.typical("sm_90"), KERNELS["fa3_forward"]


def forward_runs(kernel: str, dtype: str, *head_dims: int) -> list[Callable[[], str]]:
    """Every config of a few head dims, a mask of each sort that the kernel serves, and keys that few rows see."""
    spec = KERNELS[kernel]
    kinds = [Band(right=0), *([Band(left=40, right=0, keep=5)] if spec.masks != BAND_KINDS else [])]
    return [
        partial(forward, spec.algorithm, dtype, config, head_dim, mask, lengths)
        for mask in kinds
        for head_dim in head_dims
        for config in fitting_configs(spec, head_dim, SM_90)
        for lengths in ((140, 300), (150, 17))
    ]


def fa3(
    which: int, head_dim: int, lengths=(200, 130), softcap: float | None = None, mask: Mask = FULL,
    schedule="ascending",
) -> str:  # fmt: skip
    """By the head dim's config of this index; one block takes several short items, and its pipeline links them."""
    config = [config for config in FA3.configs if config.fits(head_dim)][which]
    inputs = make_inputs(1, 3, 1, *lengths, head_dim, "float16")
    execution = Execution("checked", schedule)
    return kinds_of(lambda: execute_on_blocks(inputs, mask, config, 1, execution, softcap=softcap))


#: By the heads that share a tile.
_SPLIT = {config.packed_heads: config for config in FA3.fitting(FA3.split_configs, 128, SM_90)[::-1]}
_FA3 = {
    "d128, Q in registers": partial(fa3, 0, 128),
    #: A second launch follows only where keys are split: no other run misses grid_release_next.
    "split": partial(forward, "fa3", "float16", _SPLIT[1], 128, FULL, (70, 700), heads=1, num_splits=3),
    "d128, two stages of Q": partial(fa3, 1, 128),
    "d128, one consumer": partial(fa3, 2, 128),
    "d64, three consumers": partial(fa3, 0, 64),
    "d256, O from registers": partial(fa3, 0, 256),
    "causal": partial(fa3, 0, 128, mask=masks.causal()),
    "softcap": partial(fa3, 0, 128, softcap=5.0),
    "window": partial(fa3, 0, 128, lengths=(330, 330), mask=Band(left=20, right=5)),
    "documents": partial(fa3, 2, 128, lengths=(200, 200), mask=masks.documents([90, 60, 50])),
    "split, heads in one tile": partial(
        forward, "fa3", "float16", _SPLIT[2], 128, FULL, (20, 700), num_splits=3
    ),
    "backward": partial(backward, "fa3", None, seqlen_q=200, seqlen_k=300),
}
_DECODE = {
    #: More tiles than stages: the wait for Q is also for the scales of the first.
    "scales of keys": partial(
        decoding, "decode_split_tma_fp8_scaled", 1, lengths=[650, 3], fp8="token", **PAGES
    ),
    "split": partial(decoding, "decode_split_tma", 3, **PAGES),
    "split, merged in clusters": partial(decoding, "decode_split_tma", 3, change=BY_CLUSTER, **PAGES),
    "split, merged by a launch": partial(decoding, "decode_split_tma", 3, change=BY_LAUNCH, **PAGES),
    "split, many rows by cp.async": partial(decoding, "decode_split", 2, which=-1, **MANY_ROWS),
    "balanced": partial(decoding, "decode_balanced_tma", 4, **PAGES),
    "balanced, merged by a launch": partial(decoding, "decode_balanced_tma", 4, change=BY_LAUNCH, **PAGES),
    "balanced, many rows": partial(
        decoding, "decode_balanced_tma", 2, which=-1, lengths=[150, 0, 90], **MANY_ROWS
    ),
    "balanced by cp.async": partial(decoding, "decode_balanced", 4, head_dim=72, new=1, page_size=3),
    "fixed maximum, many rows": partial(decoding, "decode_split", 2, which=-1, softmax_max=1e4, **MANY_ROWS),
}

#: By kernel: runs of which one must miss each call.
RUNS: dict[str, list[Callable[..., str]]] = {
    "fa2_forward": forward_runs("fa2_forward", "float16", 64, 136, 256),
    "fa2_forward_f32": forward_runs("fa2_forward_f32", "float32", 64, 136),
    "fa1_forward": forward_runs("fa1_forward", "float16", 64, 128, 40),
    "fa1_forward_f32": forward_runs("fa1_forward_f32", "float32", 64, 136),
    "naive": [*forward_runs("naive", "float16", 64, 160), *forward_runs("naive", "float32", 64)],
    "fa2_backward": [
        partial(backward, "fa2", x) for x in (SHARED, ALONE, dataclasses.replace(SHARED, num_stages=1))
    ],
    "fa2_backward_f32": [partial(backward, "fa2", x, dtype="float32") for x in (SHARED_F32, ALONE_F32)],
    "fa3": list(_FA3.values()),
    "decode": list(_DECODE.values()),
}

#: Files of a kernel, and the run that shows most of a file, which comes first.
FILES = {
    **{f"forward/{x}": ("fa2_forward", "") for x in ("fa2/kernel.cu", "fa2/store.cuh")},
    "forward/fa2_f32/kernel.cu": ("fa2_forward_f32", ""),
    "forward/fa1/kernel.cu": ("fa1_forward", ""),
    "forward/fa1_f32/kernel.cu": ("fa1_forward_f32", ""),
    "forward/naive/kernel.cu": ("naive", ""),
    **{f"backward/fa2/{x}": ("fa2_backward", "") for x in ("kernel.cu", "products.cuh", "store.cuh")},
    "backward/fa2_f32/kernel.cu": ("fa2_backward_f32", ""),
    **{
        f"forward/fa3/{x}": ("fa3", "")
        for x in ("kernel.cu", "consumer.cuh", "consumer_items.cuh", "producer.cuh", "memory.cuh")
    },
    "forward/fa3/tiles.cuh": ("fa3", "documents"),
    "wgmma/pipeline.cuh": ("fa3", ""),
    "decode/split.cu": ("decode", "split, merged by a launch"),
    "decode/balanced.cu": ("decode", "balanced, merged by a launch"),
    "decode/block.cuh": ("decode", "balanced"),
    "decode/cluster.cuh": ("decode", "split, merged in clusters"),
    "decode/merge.cuh": ("decode", "split"),
    "decode/schedule.cuh": ("decode", "balanced"),
    "decode/stream.cuh": ("decode", "balanced by cp.async"),
    "decode/tma.cuh": ("decode", "balanced"),
}

#: A call of a file that orders nothing.
SUPERFLUOUS = {
    "decode/block.cuh": "cp_async_wait<0>();",  # the groups of copies that are in flight then are empty
    # A descriptor's slot is written again several items later, and all lanes meet in a wgmma before.
    "forward/fa3/consumer_items.cuh": "warp_sync();  // all lanes have read the item's descriptor",
    # dO may join Q's group: one wait is for both.
    "backward/fa2_f32/kernel.cu": "cp_async_commit();\n  };\n  auto copy_q",
}


def calls(file: str) -> list[re.Match[str]]:
    """Without superfluous ones, those of trace builds and those in comments."""
    text, superfluous = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8"), SUPERFLUOUS.get(file)
    assert superfluous is None or superfluous in text, file
    found = []
    for match in _ORDERING.finditer(text):
        before, line = text[: match.start()].rpartition("\n")[::2]
        traced = before.rstrip().endswith("if constexpr (TRACE) {")
        if "//" not in line and not traced and match.start() != text.find(superfluous or "none"):
            found.append(match)
    return found


CALLS = [
    pytest.param(file, call, id=f"{file}:{i}-{call[0].partition('(')[0]}")
    for file in FILES
    for i, call in enumerate(calls(file))
]


@pytest.mark.sampled(fixed=4, dated=4)
@pytest.mark.parametrize(("file", "call"), CALLS)
def test_a_call_that_is_left_out_is_found(plant, file: str, call: re.Match[str]):
    plant(file, call.string, call.string[: call.start()] + ";" + call.string[call.end() :])
    kernel, first = FILES[file]
    runs = [{**_FA3, **_DECODE}[first]] if first else []
    assert any({*run().split()} - {"wrong"} for run in [*runs, *RUNS[kernel]]), "nothing found"


@pytest.mark.sampled(each="kernel", fixed=0)
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("kernel", RUNS)
def test_nothing_is_found_in_the_kernels_as_they_are(kernel: str, schedule: str | int):
    for run in of_today(RUNS[kernel], f"clean {kernel} {schedule}"):
        assert run(schedule=schedule) == ""
