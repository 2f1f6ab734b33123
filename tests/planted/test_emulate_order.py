"""Planted bugs in what only orders: wgmma.fence, stores by the copy engine, mbarriers that it counts on
(``planted_engine.cu``), launches that overlap (``planted_overlap.cu``), blocks that take turns
(``planted_turns.cu``)."""

from __future__ import annotations

import numpy as np
import pytest
from planted_support import assert_found, run_planted

from cufa.kernels import Launch
from cufa.run.emulate.launch import Execution
from cufa.run.emulate.memory import tensor_map

#: In the order of the kernels' enums: the kind of finding that must come, and what its message matches.
ENGINE = {
    "none": ("", ""),
    "no_wgmma_fence": ("wgmma-fence", "no wgmma.fence since the wgmma's registers were this thread's own"),
    "no_second_wgmma_fence": ("wgmma-fence", "no wgmma.fence since the wgmma's registers"),
    "fence_before_accumulator": ("wgmma-fence", "were written after the last wgmma.fence"),
    "fence_before_operand": ("wgmma-fence", "were written after the last wgmma.fence"),
    "operand_touched": ("accumulator-touched", "operand registers of the wgmma"),
    "no_init_fence": ("proxy-fence", "no fence.mbarrier_init by warp 0 lane 0 comes before"),
    "init_fence_too_late": ("proxy-fence", "no fence.mbarrier_init by warp 0 lane 0 comes before"),
    "init_fence_by_another": ("proxy-fence", "no fence.mbarrier_init by warp 0 lane 0 comes before"),
    "no_store_fence": (
        "proxy-fence",
        "no fence.proxy.async between an ordinary access and the copy engine's",
    ),
    "no_commit": (
        "copy-in-flight",
        "a store by the copy engine that may not have read its shared memory yet",
    ),
    "no_wait": ("copy-in-flight", "a store by the copy engine that may not have read its shared memory yet"),
    "overwritten": (
        "copy-not-awaited",
        "touches data of an asynchronous copy that was not waited for: shared",
    ),
    "overwritten_by_another": ("copy-not-awaited|race", "shared offset"),
    "sent_by_another": ("race", "no barrier orders this access after another thread's: shared offset"),
    "read_back": ("copy-not-awaited", "touches data of an asynchronous copy that was not waited for: byte"),
}
OVERLAP = {
    "none": ("", ""),
    "no_release": ("never-released", "planted_second may begin before planted_first is over"),
    "no_await": ("race", "the launch before may still be writing byte .* of between, no griddepcontrol.wait"),
    "late_await": (
        "race",
        "the launch before may still be writing byte .* of between, no griddepcontrol.wait",
    ),
    "one_thread_awaits": ("race", "the launch before may still be writing byte .* of between"),
    "stores_early": ("race", "the launch before may still be reading byte .* of read"),
    "adds_early": ("race", "the launch before may still be writing byte .* of sums"),
}
TURNS = {
    "none": ("", ""),
    "no_barrier_before_release": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "no_barrier_after_wait": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "no_wait": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "no_release": ("deadlock", "the counter at byte 0 of counters stays at 0"),
    "early_release": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "plain_wait": ("race", "blocks . and . of one launch both touch byte 0 of counters"),
    "relaxed_wait": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "other_counter": ("race", "blocks . and . of one launch both touch byte .* of words"),
    "addition_before_turn": ("unordered-sum", "of one launch add in any order to byte .* of sums"),
    "addition_in_block": ("unordered-sum", "two threads add in any order: byte .* of sums"),
}
SCHEDULES = pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
BLOCKS = 4


@pytest.mark.sampled(each="name")
@SCHEDULES
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("name", ENGINE)
def test_engine(name, copies, schedule):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (1, 1, 64, 64)).astype(np.float16) for _ in range(2))
    arrays = {
        "out": np.zeros((2, 1, 64, 64), np.float16),
        "back": np.zeros(128, np.uint32),
        "a_in": a,
        "b_in": b,
    }
    maps = tensor_map(a, 64), tensor_map(b, 64), tensor_map(arrays["out"], 16)
    shared = 3 * 64 * 128 + 8
    launch = Launch("planted_engine", (1, 1, 1), 128, shared)
    execution = Execution("checked", schedule, copies)
    found = run_planted(
        "planted_engine.cu",
        list(ENGINE).index(name),
        arrays,
        (launch,),
        execution,
        maps,
        {"SMEM_BYTES": shared},
    )
    assert_found(found.findings, *ENGINE[name])
    if name == "none":
        product = a[0, 0].astype(float) @ b[0, 0].T.astype(float)
        np.testing.assert_array_equal(arrays["out"][0, 0], product)  # small integers: exact
        assert (arrays["out"][1, 0] != product).any()


@pytest.mark.sampled(each="name")
@SCHEDULES
@pytest.mark.parametrize("name", OVERLAP)
def test_overlap(name, schedule):
    arrays = {x: np.arange(BLOCKS * 64, dtype=np.uint32) for x in ("between", "read", "sums", "out")}
    arrays["sums"] = np.zeros(64, np.float32)
    first = Launch("planted_first", (BLOCKS, 1, 1), 64, 0)
    second = Launch("planted_second", (BLOCKS, 1, 1), 64, 0, dependent=True)
    execution = Execution("checked", schedule)
    found = run_planted("planted_overlap.cu", list(OVERLAP).index(name), arrays, (first, second), execution)
    assert_found(found.findings, *OVERLAP[name])
    if name == "none":
        # The same two as launches that never overlap: then nothing is awaited, and nothing is found.
        again = Launch("planted_second", (BLOCKS, 1, 1), 64, 0)
        no_await = list(OVERLAP).index("no_await")
        assert (
            run_planted("planted_overlap.cu", no_await, arrays, (first, again, first), execution).findings
            == ()
        )


@pytest.mark.sampled(each="name")
@SCHEDULES
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", TURNS)
def test_turns(name, threads, schedule):
    arrays = {"words": np.arange(64, dtype=np.uint32), "sums": np.zeros(64, np.float32)}
    arrays["counters"] = np.zeros(2, np.uint32)
    expected = arrays["words"].copy()
    launch = Launch("planted_turns", (BLOCKS, 1, 1), 64, 0)
    execution = Execution("checked", schedule, threads=threads)
    found = run_planted(
        "planted_turns.cu", list(TURNS).index(name), arrays, (launch,), execution, ordered_sums=True
    )
    assert_found(found.findings, *TURNS[name])
    if name == "relaxed_wait":
        assert "unordered-sum" not in {f.kind for f in found.findings}
    if name == "none":
        for block in range(BLOCKS):
            expected = expected[np.arange(64) ^ 40] * np.uint32(5) + np.uint32(block)
        np.testing.assert_array_equal(arrays["words"], expected)
        np.testing.assert_array_equal(arrays["sums"], 2.0 * BLOCKS)


def test_additions_may_come_in_any_order_unless_it_is_asked_for():
    arrays = {"words": np.arange(64, dtype=np.uint32), "sums": np.zeros(64, np.float32)}
    arrays["counters"] = np.zeros(2, np.uint32)
    launch = Launch("planted_turns", (BLOCKS, 1, 1), 64, 0)
    for name in ("addition_before_turn", "addition_in_block"):
        arrays["counters"][:] = 0
        bug = list(TURNS).index(name)
        assert run_planted("planted_turns.cu", bug, arrays, (launch,), Execution("checked")).findings == ()
