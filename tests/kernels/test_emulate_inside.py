"""Inside traces of kernels executed on a CPU: every phase begins and ends, every tile that the schedule says is
stamped, and lost stamps are reported. The clock counts what was executed, so that nothing here depends on time."""

from __future__ import annotations

import numpy as np
import pytest
from backward_support import make_case as make_backward_case
from decode_kernel_support import operands_of, plan_of, splits
from decode_support import make_case as make_decode_case
from support import assert_attention, forward_operands, make_inputs, plan_with_blocks

from cufa import masks
from cufa.build.compiler import keeps_logs
from cufa.build.phases import PHASES, PRODUCTS, Logs, Room, intervals, mistakes, visited
from cufa.kernels import KERNELS
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import emulate, emulate_backward, run_plan
from cufa.run.emulate.launch import Execution

MASKS = pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(40, 25)], ids=["full", "causal", "band"])


def counts(logs: Logs) -> dict[str, int]:
    """Intervals of each phase."""
    number = np.bincount(intervals(logs)["phase"], minlength=len(PHASES))
    return {name: int(n) for name, n in zip(PHASES, number, strict=True) if n}


def assert_sound(logs: Logs) -> np.ndarray:
    """Nothing missing, phases of a warp one after another, products landed behind where they were issued."""
    assert mistakes(logs) == []
    found = intervals(logs)
    assert (found["end"] >= found["begin"]).all()
    for log in range(len(logs.heads)):
        own = found[(found["log"] == log) & ~found["flight"]]
        assert (own["begin"][1:] >= own["end"][:-1]).all()
    flights = {PHASES[x] for x in found["phase"][found["flight"]]}
    assert flights <= set(PRODUCTS)
    return found


def assert_tiles_of(record: np.void, by_log: dict[int, list[int]], every_warp: bool) -> None:
    """Each warp computes tiles of the item's, none twice; all warps, or all together, compute all of them."""
    wanted = set(range(record["first_tile"], record["first_tile"] + record["tiles_visited"]))
    for tiles in by_log.values():
        assert len(set(tiles)) == len(tiles)
        assert set(tiles) <= wanted
        assert not every_warp or set(tiles) == wanted
    assert set().union(*by_log.values()) == wanted


@pytest.mark.sampled(fixed=0, dated=1)
@MASKS
@pytest.mark.parametrize("head_dim", [64, 256])
def test_fa2(mask, head_dim):
    q, k, v = make_inputs(1, 2, 1, 200, 300, head_dim)
    run = emulate(q, k, v, mask=mask, algorithm="fa2", mode="checked", schedule=1, inside=True)
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_attention(run.out, run.lse, q, k, v, mask=mask)
    assert run.inside is not None
    of_items = visited(assert_sound(run.inside))
    assert len(run.inside.heads) == np.prod(run.plan.launches[0].grid) * run.plan.config.num_warps
    written = run.inside.items["end_ns"] > 0  # a split that has no tiles leaves no record
    assert written.sum() == len(run.records) and set(of_items) == set(np.flatnonzero(written).tolist())
    for item, record in enumerate(run.inside.items):
        if not written[item]:
            continue
        assert len(of_items[item]) == run.plan.config.num_warps
        assert_tiles_of(record, of_items[item], every_warp=True)
    phases = counts(run.inside)
    assert phases["SCORES"] == phases["SOFTMAX"] == phases["VALUES"]


@pytest.mark.sampled(fixed=0, dated=1)
@MASKS
@pytest.mark.parametrize(("head_dim", "softcap"), [(64, None), (128, None), (128, 20.0), (256, None)])
def test_fa3(mask, head_dim, softcap):
    """Few blocks, so that the pipeline runs on from item to item: producer and consumers of each."""
    q, k, v = make_inputs(1, 3, 1, 400, 500, head_dim)
    first = emulate(
        q, k, v, mask=mask, softcap=softcap, algorithm="fa3", mode="checked", schedule=1, inside=True,
        num_splits=1,
    )  # fmt: skip
    assert not first.findings, "\n".join(map(str, first.findings))
    config = first.plan.config
    plan = plan_with_blocks(first.plan.problem, config, 2)
    run = run_plan(plan, forward_operands(q, k, v), Execution("checked", 2), inside=True)
    assert not run.findings, "\n".join(map(str, run.findings))
    np.testing.assert_array_equal(run.out, first.out)
    assert run.inside is not None
    found, consumers = assert_sound(run.inside), config.num_warps // 4 - 1
    assert len(run.inside.heads) == 2 * (1 + consumers)
    of_items = visited(found)
    for item, record in enumerate(run.inside.items):
        if record["tiles_visited"]:
            assert len(of_items[item]) == consumers
            assert_tiles_of(record, of_items[item], every_warp=mask == FULL)
    # Every product of a consumer was in flight, every tile was asked for: K and V of each.
    flights = found[found["flight"]]
    per_item = [(flights["phase"] == PHASES.index(name)).sum() for name in ("SCORES", "VALUES")]
    assert per_item[0] == per_item[1] == sum(len(x) for logs in of_items.values() for x in logs.values())
    asked = found[(found["phase"] == PHASES.index("COPY")) & (found["number"] >= 0)]
    assert len(asked) == 2 * run.inside.items["tiles_visited"].sum()
    assert set(run.inside.heads["warp"][asked["log"]]) == {0}


@pytest.mark.parametrize(
    "kernel", ["decode_split", "decode_split_tma", "decode_balanced", "decode_balanced_tma"]
)
def test_decode(kernel):
    case = make_decode_case(lengths=[700, 3, 400], tokens=2, new=1, head_dim=64, page_size=16)
    plan, operands = plan_of(case, kernel, splits(kernel, 3)), operands_of(case)
    run = run_plan(plan, operands, Execution("checked", 1), inside=True)
    assert not run.findings, "\n".join(map(str, run.findings))
    case.check(operands["out"], operands["lse"])
    assert run.inside is not None
    of_items = visited(assert_sound(run.inside))
    for item, record in enumerate(run.inside.items):
        if record["end_ns"]:
            assert_tiles_of(record, of_items[item], every_warp=False)
    assert counts(run.inside)["MERGE"] >= len(run.records)


@pytest.mark.sampled(fixed=0, dated=1)
@MASKS
@pytest.mark.parametrize(
    ("algorithm", "head_dim"),
    [("fa2", 64), ("fa2", 128), ("fa3", 64), ("fa3", 128), ("fa3", 136), ("fa3", 256)],
)
def test_backward(mask, algorithm, head_dim):
    case = make_backward_case(1, 4, 2, 130, 200, head_dim, mask=mask)
    run = emulate_backward(
        *case.arrays, mask=mask, algorithm=algorithm, mode="checked", schedule=1, inside=True
    )
    assert not run.findings, "\n".join(map(str, run.findings))
    assert run.inside is not None
    of_items = visited(assert_sound(run.inside))
    for item, record in enumerate(run.inside.items):
        first, count, kv_head = (int(record[x]) for x in ("first_tile", "tiles_visited", "head"))
        heads = range(2 * kv_head, 2 * kv_head + 2)
        wanted = {head << 12 | tile for head in heads for tile in range(first, first + count)}
        for tiles in of_items.get(item, {}).values():
            assert set(tiles) == wanted
        assert count == 0 or of_items[item]
    phases = counts(run.inside)
    assert {
        "SCORES",
        "WEIGHT_GRADIENTS",
        "VALUE_GRADIENTS",
        "KEY_GRADIENTS",
        "QUERY_GRADIENTS",
        "ADD",
    } <= set(phases)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_fixed_order_of_tiles_of_documents(causal):
    """Causal: where a document begins in a block of 128 keys, the block visits its first two tiles of 64 queries of
    both heads, then all other tiles. Both ways: each tile of both heads."""
    mask = masks.documents([140, 260], causal=causal)
    case = make_backward_case(1, 4, 2, 400, 400, 128, mask=mask)
    run = emulate_backward(
        *case.arrays, mask=mask, deterministic=True, algorithm="fa3", mode="checked", inside=True
    )
    assert not run.findings, "\n".join(map(str, run.findings))
    assert run.inside is not None
    of_items = visited(assert_sound(run.inside))
    parts = {0: [[0, 1, 2]], 1: [[2, 3], [4, 5, 6]], 2: [[4, 5, 6]], 3: [[6]]}  # query tiles, by key block
    both = {0: [0, 1, 2], 1: [0, 1, 2, 3, 4, 5, 6], 2: [2, 3, 4, 5, 6], 3: [2, 3, 4, 5, 6]}
    for item, record in enumerate(run.inside.items):
        heads, block = (2 * int(record["head"]), 2 * int(record["head"]) + 1), int(record["q_block"])
        if causal:
            wanted = [head << 12 | x for part in parts[block] for head in heads for x in part]
        else:
            wanted = [head << 12 | x for x in both[block] for head in heads]
        for found in of_items[item].values():
            assert list(found) == wanted


def test_what_has_no_room_is_told():
    """Logs that are full keep their beginning, and nothing is written behind them; warps without a log are counted."""
    q, k, v = make_inputs(1, 2, 2, 130, 300, 64)
    whole = emulate(q, k, v, algorithm="fa2", threads=1, inside=True)
    assert whole.inside is not None and mistakes(whole.inside) == []
    operands = forward_operands(q, k, v)
    room = Room(len(whole.inside.items), logs=3, stamps=10)
    run = run_plan(whole.plan, operands, Execution("checked", threads=1), inside=room)
    assert not run.findings, "\n".join(map(str, run.findings))
    np.testing.assert_array_equal(operands["out"], whole.out)
    np.testing.assert_array_equal(run.records["tiles_visited"], whole.records["tiles_visited"])
    logs = run.inside
    assert logs is not None and len(logs.heads) == 3
    assert logs.refused == len(whole.inside.heads) - 3
    made = len(whole.inside.stamps[0])
    assert logs.heads["stamps"].tolist() == [made] * 3 and logs.lost == 3 * (made - 10)
    for kept, full in zip(logs.stamps, whole.inside.stamps, strict=False):
        np.testing.assert_array_equal(kept["code"], full["code"][:10])
    told = mistakes(logs)
    assert told == [
        f"{logs.refused} warps kept no log, because all logs were taken: their phases are missing",
        f"{logs.lost} stamps were lost, because 3 logs were full: the end of these logs is missing",
    ]
    assert len(intervals(logs))  # what there is can be read


def damaged(logs: Logs, code: int, position: int) -> Logs:
    """With one stamp of the first log changed."""
    stamps = logs.stamps[0].copy()
    stamps["code"][position] = code
    return Logs(logs.heads, (stamps, *logs.stamps[1:]), logs.items, logs.refused)


def test_mistakes_are_found():
    q, k, v = make_inputs(1, 1, 1, 64, 300, 64)
    logs = emulate(q, k, v, algorithm="fa2", inside=True).inside
    assert logs is not None
    scores = PHASES.index("SCORES")
    (text,) = mistakes(damaged(logs, scores << 24, -1))
    assert text.endswith("ends in SCORES")
    (text,) = mistakes(damaged(logs, (scores | 0x40) << 24, 3))
    assert text.endswith("ends with SCORES in flight")
    (text,) = mistakes(damaged(logs, (scores | 0x80) << 24, 3))
    assert text.endswith("awaits SCORES, which is not in flight")
    (text,) = mistakes(damaged(logs, 60 << 24, 3))
    assert text.endswith("which is no phase")


def test_an_inside_trace_changes_no_result():
    """Stamps neither order warps nor change a number; without them there are no logs."""
    q, k, v = make_inputs(1, 2, 2, 130, 300, 64)
    plain = emulate(q, k, v, algorithm="fa3", trace=False)
    stamped = emulate(q, k, v, algorithm="fa3", inside=True)
    assert plain.inside is None and stamped.inside is not None
    np.testing.assert_array_equal(plain.out, stamped.out)
    for entry, counted in plain.counters.items():
        for name in counted.dtype.names or ():
            if name != "switches":
                np.testing.assert_array_equal(counted[name], stamped.counters[entry][name], name)


def test_a_causal_problem_without_visible_tiles():
    """Query blocks that see nothing never enter the pipeline, and no warp stamps their tiles."""
    q, k, v = make_inputs(1, 1, 1, 400, 30, 64)
    run = emulate(q, k, v, causal=True, algorithm="fa3", mode="checked", inside=True)
    assert run.inside is not None
    of_items = visited(assert_sound(run.inside))
    empty = np.flatnonzero(run.inside.items["tiles_visited"] == 0)
    assert len(empty) and not set(empty.tolist()) & set(of_items)


def test_kernels_that_keep_logs():
    keeping = {name for name, spec in KERNELS.items() if keeps_logs(spec.source)}
    assert {"fa2_forward", "fa3_forward", "fa2_backward", "fa3_backward"} <= keeping
    assert {name for name, spec in KERNELS.items() if spec.operation == "decode"} <= keeping
    assert "naive" not in keeping
