"""Inside traces: sums against brute force, files that come back as they were, and what Perfetto is given."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import why_no_compiler
from evidence.traced import inside_plans

from cufa.build.phases import INTERVAL, LOG_HEAD, PHASES, PRODUCTS, STAMP, Logs, Room, mistakes
from cufa.cli import main
from cufa.gpu.architectures import Device
from cufa.measure import inside
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import about, lanes, length, perfetto, sums, union
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL

H200 = Device.typical("sm_90")


@pytest.fixture(scope="module")
def trace() -> InsideTrace:
    """FA3 of one head, executed."""
    if reason := why_no_compiler():
        pytest.skip(reason)
    return inside.execute(make_plan(make(1, 1, 300, 64, "bfloat16", CAUSAL), H200, "fa3"))


@pytest.fixture
def measured(trace: InsideTrace) -> InsideTrace:
    """The same as if a GPU had written it: 2 ticks per nanosecond, clocks that pass 2^32."""
    logs, offset = trace.logs, 2**33 - 5000
    heads = logs.heads.copy()
    for name in ("start", "end"):
        heads[f"{name}_ns"] = 10**9 + heads[f"{name}_clock"] // 2
        heads[f"{name}_clock"] += np.uint64(offset)
    stamps = tuple(x.copy() for x in logs.stamps)
    for x in stamps:
        x["clock"] += np.uint32(offset % 2**32)
    environment = {"device": "NVIDIA H200", "recorded": "2026-11-22T10:00:00", "arch": "sm_90"}
    return dataclasses.replace(
        trace,
        clock="cycles",
        environment=environment,
        slowdown=1.125,
        logs=dataclasses.replace(logs, heads=heads, stamps=stamps),
    )


def test_a_clock_that_passes_32_bits_is_read_on(trace, measured):
    """And cycles become microseconds by the two clocks of the logs' ends."""
    assert mistakes(measured.logs) == []
    assert measured.logs.ticks_per_ns() == pytest.approx(2, rel=1e-3)
    as_executed, as_time = trace.intervals(), measured.intervals()
    np.testing.assert_allclose(as_time["begin"] * 2000, as_executed["begin"], rtol=1e-3)
    assert (as_time["phase"] == as_executed["phase"]).all()


def test_what_is_saved_comes_back(measured, tmp_path: Path):
    file = inside.save(measured, tmp_path)
    assert list(tmp_path.iterdir()) == [file]  # nothing half-written beside it
    again = inside.load(file)
    assert dataclasses.replace(again, logs=measured.logs) == measured
    np.testing.assert_array_equal(again.intervals(), measured.intervals())
    np.testing.assert_array_equal(again.logs.items, measured.logs.items)
    assert inside.load_all(tmp_path).keys() == {file.stem}
    assert again.is_current


def test_a_trace_of_a_cpu_is_no_evidence(trace, tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be stored"):
        inside.save(trace, tmp_path / "records")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("damage", ["cut", "no zip", "other phases"])
def test_a_damaged_file_is_refused_by_name(measured, tmp_path: Path, damage):
    if damage == "other phases":
        measured = dataclasses.replace(measured, phases=PHASES[::-1])
    file = inside.save(measured, tmp_path)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    if damage == "no zip":
        file.write_text("something else")
    with pytest.raises(ValueError, match=f"^{file.name} is no inside trace"):
        inside.load(file)


def test_union_against_brute_force():
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 5, 40):
        found = np.zeros(count, INTERVAL)
        found["begin"] = rng.integers(0, 60, count)
        found["end"] = found["begin"] + rng.integers(0, 9, count)
        covered = np.zeros(80, bool)
        for x in found:
            covered[int(x["begin"]) : int(x["end"])] = True
        merged = union(found)
        assert length(merged) == covered.sum()
        assert (merged["begin"][1:] > merged["end"][:-1]).all()


def made(*warps: list[tuple[int, str, int]]) -> InsideTrace:
    """A trace of stamps (clock, phase, kind) of each warp; kind 0x40 in flight, 0x80 landed."""
    stamps = [
        np.array([(t, (PHASES.index(p) | kind) << 24 | 1) for t, p, kind in log], STAMP) for log in warps
    ]
    heads = np.zeros(len(warps), LOG_HEAD)
    heads["warp"], heads["stamps"] = np.arange(len(warps)), [len(x) for x in stamps]
    heads["end_clock"] = heads["end_ns"] = 1000
    problem = make(1, 1, 300, 64, "bfloat16", CAUSAL)
    plan = make_plan(problem, H200, "fa3")
    logs = Logs(heads, tuple(stamps), Room(1).read(np.zeros(Room(1).size, np.uint8)).items, 0)
    return InsideTrace(plan.spec.name, "", problem, plan.config, {}, "executed", PHASES, None, logs)


def test_sums_of_a_ping_pong():
    """One warp's softmax from 10 to 30 and 60 to 70, the other's products from 20 to 65: 15 of 30 run beside them."""
    of_sm = sums(
        made_trace := made(
            [
                (0, "WAIT_DATA", 0),
                (10, "SOFTMAX", 0),
                (30, "WAIT_TURN", 0),
                (60, "SOFTMAX", 0),
                (70, "NOTHING", 0),
            ],
            [
                (5, "ISSUE", 0),
                (20, "SCORES", 0x40),
                (20, "WAIT_PRODUCTS", 0),
                (65, "SCORES", 0x80),
                (65, "NOTHING", 0),
            ],
        ),
        made_trace.intervals(),
    )
    assert (of_sm.span, of_sm.lanes, of_sm.lane_time) == (70, 2, 130)
    assert (of_sm.softmax, of_sm.products, of_sm.both, of_sm.exposed) == (30, 45, 15, 15)
    assert of_sm.overlap == 0.5
    assert of_sm.waits == {"WAIT_DATA": 10, "WAIT_TURN": 30, "WAIT_PRODUCTS": 45}
    assert of_sm.share(13) == 0.1
    with pytest.raises(ValueError, match="no warp of SM 7"):
        sums(made_trace, made_trace.intervals(), 7)


def test_lanes_are_told_apart_by_what_they_do(trace):
    roles = {lane.warp: lane.role for lane in lanes(trace, trace.intervals())}
    assert roles[0] == "producer"
    assert set(roles.values()) == {"producer", "consumer"}


def test_an_interval_in_words(trace):
    found = trace.intervals()
    scores = found[(found["phase"] == PHASES.index("SCORES")) & (found["number"] == 1)][0]
    first = trace.config.block_kv
    text = about(trace, scores)
    assert text.startswith(
        f"S = Q Kᵀ, in flight · key tile 1 (keys {first} to {2 * first - 1}) · query block "
    )
    assert text.endswith("head 0, batch 0")


def test_perfetto(trace):
    """Every interval once, none of a thread crossing another, a name for each process and thread."""
    document = json.loads(perfetto(trace))
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(trace.intervals())
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert set(by_thread) <= named
    for pairs in by_thread.values():
        pairs.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(pairs))
    assert "order, not time" in document["otherData"]["note"]
    assert {e["cat"] for e in events} >= {"SOFTMAX", "SCORES", "VALUES", "WAIT_DATA"}


def test_what_is_to_be_recorded():
    """Every kernel with logs that runs on the card, forward, backward and decoding."""
    kernels = {plan.spec.name for plan in inside_plans(H200)}
    assert kernels >= {"fa2_forward", "fa3_forward", "fa2_backward"}
    assert any(name.startswith("decode") for name in kernels)
    assert set(PRODUCTS) <= set(PHASES)


def test_recorded_traces_say_what_stamps_cost():
    """The page says of a trace whose kernel has changed since that it is stale."""
    recorded = inside.load_all()
    assert recorded
    for name, trace in recorded.items():
        assert trace.slowdown is not None and 0.9 < trace.slowdown < 1.5, name


def test_command(trace, tmp_path: Path):
    command = [
        "inside", "--executed", "--heads", "1", "--seqlen", "200", "--perfetto", str(tmp_path / "t.json"),
    ]  # fmt: skip
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "executed on the CPU: order, not time" in done.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = CliRunner().invoke(main, [*command, "--json", "--algorithm", "fa2"])
    document = json.loads(done.stdout)
    assert (document["clock"], document["mistakes"]) == ("executed", [])
    assert document["phases"]["SCORES"] > 0


def test_command_says_what_it_cannot():
    done = CliRunner().invoke(main, ["inside", "--executed", "--algorithm", "naive"])
    assert done.exit_code == 2
    assert "keeps no logs of its phases; kernels that do: " in done.output
    assert CliRunner().invoke(main, ["inside", "--recorded", ""]).exit_code == 2
    done = CliRunner().invoke(main, ["inside", "--recorded", "something"])
    assert done.exit_code == 2
    assert "no inside trace of this name" in done.output


@pytest.mark.parametrize(("place", "reason"), [("nowhere/t.json", "No such file"), ("", "is a directory")])
def test_a_trace_that_cannot_be_written(trace, tmp_path: Path, monkeypatch, place, reason):
    monkeypatch.setattr(inside, "execute", lambda plan: trace)
    done = CliRunner().invoke(main, ["inside", "--executed", "--perfetto", str(tmp_path / place)])
    assert done.exit_code == 2
    assert "--perfetto" in done.stderr and reason in done.stderr
    assert done.stdout == ""
