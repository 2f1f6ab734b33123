"""The page Masked work under Streamlit's AppTest."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from card_support import edit
from conftest import why_no_compiler
from dashboard_page_support import alts, chosen, figures, has, open_page, parameters, save_trace, words
from dashboard_support import DEVICE, make_records, write_evidence

from cufa import masks
from cufa.dashboard.model import devices
from cufa.gpu.architectures import Device
from cufa.measure import inside
from cufa.measure.cases import of_forward
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL
from cufa.problem.problem import Problem

LINKS = (
    {"alg": "fa1"},
    {"alg": "fa2_noskip"},
    {"alg": "fa3"},
    {"alg": "fa3", "mask": "full", "d": "256", "tiles": "custom"},
    {"mask": "full"},
    {"alg": "fa3", "mask": "window", "left": "300", "right": "100"},
    {"alg": "fa2_noskip", "mask": "window", "left": "0", "right": "0", "sk": "5000", "diag": "top-left"},
    {"mask": "window", "left": "10", "right": "none", "diag": "at", "at": "9999"},
    {"alg": "fa1", "mask": "window", "softcap": "50"},
    {"sq": "1", "sk": "1"},
    {"sq": "1000", "sk": "10"},
    {"sq": "10", "sk": "1000", "batch": "1", "heads": "1"},
    {"sq": "16384", "sk": "16384", "tiles": "custom", "bq": "64", "bkv": "64", "batch": "4", "heads": "20"},
    {"sq": "131072", "sk": "131072", "tiles": "custom", "bq": "16", "bkv": "16"},
    {"d": "256", "card": "86"},
    {"op": "backward"},
    {"op": "backward", "kv": "4", "mask": "window", "left": "500", "right": "0"},
    {"op": "backward", "mask": "full", "sq": "1000", "sk": "10"},
    {"op": "backward", "sq": "1", "sk": "1"},
    {"op": "backward", "sq": "10", "sk": "1000", "batch": "1", "heads": "1", "softcap": "30"},
    {"op": "backward", "d": "256", "card": "86"},
    {"op": "backward", "two": "1", "b_mask": "full"},
    {"op": "backward", "mask": "window", "left": "10", "right": "none", "diag": "at", "at": "9999"},
    {"op": "backward", "sq": "131072", "sk": "131072", "tiles": "custom", "bq": "16", "bkv": "16"},
)


@pytest.mark.sampled(fixed=3, dated=2)
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_every_algorithm_and_shape_can_be_drawn(link: dict[str, str]) -> None:
    app = open_page("masked_work", **link)
    assert "cufa-verdict" in words(app)
    assert parameters(app).get("op", "forward") == link.get("op", "forward")


def test_tiles_that_would_be_too_many_are_made_larger_and_it_says_so() -> None:
    app = open_page("masked_work", sq="131072", tiles="custom", bq="16")
    assert "are too many" in app.warning[0].value


@pytest.mark.parametrize(
    ("folder", "card", "device"),
    [
        ("records", "90", "NVIDIA H200"),
        ("cache", "90", "NVIDIA H200"),
        ("records", "80", "NVIDIA H200"),
        ("records", "90x114", "NVIDIA H200"),
        ("records", "90", "NVIDIA H100 80GB HBM3"),
    ],
    ids=[
        "recorded",
        "measured here",
        "another architecture",
        "fewer SMs",
        "another card of the architecture",
    ],
)
def test_a_trace_stands_beside_the_prediction(folder: str, card: str, device: str, elsewhere: Path) -> None:
    """A trace of another card is shown as that, and judges nothing."""
    app = open_page("masked_work", card=card)
    assert "no trace of this problem is recorded" in words(app)
    save_trace(
        elsewhere / folder, make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, "fa2"), device
    )
    app.run()
    said = words(app)
    origin, other = ("recorded", "measured") if folder == "records" else ("measured", "recorded")
    has(said, "agree with every row of the schedule", device, f"{origin}</span>The kernel")
    assert f"{other}</span>" not in said
    judged = ["The tail is as predicted"]
    foreign = [
        f"On another card, {device}: ",
        "This says nothing about ",
        "no trace of this problem is recorded",
    ]
    is_own = (card, device) == ("90", "NVIDIA H200")
    has(said, *(judged if is_own else foreign))
    assert not [text for text in (foreign if is_own else judged) if text in said]
    assert any("predicted, " in alt and "SMs sorted" in alt for alt in alts(app)) == is_own


@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        (make(2, 4, 2048, 64, "bfloat16", CAUSAL), "fa1"),
        (make(4, 16, 4096, 128, "bfloat16", masks.documents([1000, 3096])), "fa2"),
        (of_forward(make(2, 4, 2048, 64, "bfloat16", CAUSAL)), "fa2"),
    ],
    ids=["forward", "documents", "backward"],
)
def test_a_recorded_trace_can_be_opened(problem: Problem, algorithm: str, elsewhere: Path) -> None:
    """The controls become those of its launch, with which its counters agree; with others they do not stand there."""
    trace = save_trace(elsewhere / "records", make_plan(problem, DEVICE, algorithm))
    app = open_page("masked_work", sq="2000")
    assert "agree with every" not in words(app)
    app.selectbox(key="masked.open").select(trace.name).run()
    assert app.selectbox(key="masked.open").value is None
    assert app.number_input(key="masked.sq").value == problem.seqlen_q
    found = parameters(app)
    assert (found.get("op", "forward"), found.get("alg", "fa2")) == (problem.operation, algorithm)
    line = "column" if problem.operation == "backward" else "row"
    has(words(app), f"agree with every {line} of the schedule", "The tail is as predicted")


def test_damaged_files_are_named_and_the_page_goes_on(elsewhere: Path) -> None:
    folder = elsewhere / "records" / "traces"
    folder.mkdir(parents=True)
    (folder / "broken.trace").write_bytes(b"no trace")
    assert "broken.trace" in open_page("masked_work").warning[0].value
    write_evidence(elsewhere / "records", "versions").write_text('{"what": "tests"}')
    for name in ("masked_work", "roofline"):
        assert "cannot be read" in words(open_page(name))


def test_idle_time_is_told_by_sms_and_by_places() -> None:
    """In the last wave, each SM has a block, and half of the places are empty."""
    said = words(open_page("masked_work", mask="full"))
    assert "2,048 thread blocks, 7.8 waves: 0% of SM time is idle at the end, 3.0% of the places" in said


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_disagreement_is_an_alarm(operation: str, elsewhere: Path) -> None:
    problem = dataclasses.replace(make(4, 16, 4096, 128, "bfloat16", CAUSAL), operation=operation)
    plan = make_plan(problem, DEVICE, "fa2")
    records = make_records(plan)
    records["tiles_visited"][7] += 1
    save_trace(elsewhere / "records", plan, records=records)
    app = open_page("masked_work", op=operation)
    assert "Alarm" in words(app)
    assert "1 of 2,048 records differ" in app.error[0].value


def test_a_trace_that_fails_is_shown_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)  # the started process finds no GPU
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    app = open_page("masked_work")
    assert app.selectbox(key="masked.card").value == "90"
    assert "Made-up GPU" in app.selectbox(key="masked.card").options[0]
    app.button(key="masked.trace").click().run()
    assert not app.exception
    assert "ended with code" in app.error[0].value


@pytest.mark.parametrize(
    ("link", "line"),
    [({}, "row"), ({"mask": "documents"}, "row"), ({"mask": "prefix"}, "row"),
     ({"op": "backward", "sk": "200"}, "column")],
    ids=str,
)  # fmt: skip
def test_the_kernel_counts_on_this_cpu(link: dict[str, str], line: str) -> None:
    app = open_page("masked_work", **{"sq": "300", "sk": "300", "d": "64", **link})
    app.button(key="masked.emulate").click().run()
    assert not app.error, app.error[0].value
    assert f"this CPU, one head) agree with every {line} of the schedule" in words(app)
    app.number_input(key="masked.sq").set_value(299).run()
    assert "this CPU, one head)" not in words(app), "another launch"


def test_a_tile_shows_its_softmax() -> None:
    app = open_page("masked_work", q="5", k="0")
    assert "first maximum" in words(app)
    assert any("DEVICE TileRange" in code.value for code in app.code), "the kernel's lines beside a figure"
    app.number_input(key="masked.k").set_value(40).run()
    assert "is skipped" in words(app)
    assert chosen(app) == {"q": "5", "k": "40"}


def test_recorded_speedups_are_drawn(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions")
    app = open_page("masked_work")
    drawn = figures(app)
    names = [trace.get("name", "") for figure in drawn for trace in figure["data"]]
    for dtype in ("float16", "float32"):
        assert any(name.startswith(f"Made-up GPU, {dtype}") for name in names)
    shape = "float16 d64, 4 heads, in turns"
    has(
        words(app),
        f"skipping alone, {shape}: 1.50× at 512",
        f"FA1→FA2 with all changes, {shape}: 2.50× at 512",
    )
    other = words(open_page("masked_work", mask="window"))
    assert "no measurement with and without skipping under window" in other


def test_tiles_are_sorted_by_predicted_time_and_measured_ones_show_the_error(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    file.write_text(file.read_text().replace("Made-up GPU", "NVIDIA H200"))
    app = open_page("masked_work", alg="fa3", batch="4", heads="16", d="128")
    table = next(e.value for e in app.dataframe if "bound by" in e.value)
    ratios = [float(x.removesuffix("×")) for x in table["÷ shortest"]]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert len(ratios) > 2
    bounds = {"products", "power", "exponentials", "shared memory", "memory", "busiest block"}
    assert set(table["bound by"]) <= bounds
    (row,) = (
        n for n, x in enumerate(table["recorded"]) if x != "–"
    )  # the planner's, on a shape of the suite
    assert table["prediction off by"][row] != "–"
    said = words(app)
    assert re.search(r"is predicted at [0-9.]+ .s, (bound by|waiting)", said)
    assert re.search(r"fa3_forward: median error \d+%, maximum \d+%, \d+ rows", said)


def test_times_are_predicted_only_where_ceilings_and_a_derivation_are_there(elsewhere: Path) -> None:
    assert "no ceilings of H200 are recorded" in words(open_page("masked_work", alg="fa3"))
    file = write_evidence(elsewhere / "records")
    file.write_text(file.read_text().replace("Made-up GPU", "NVIDIA H200"))
    assert "is not modelled" in words(open_page("masked_work", alg="fa1"))
    measured = open_page("masked_work", alg="fa2", op="backward", batch="4", heads="16", d="128")
    assert re.search(r"is predicted at [0-9.]+ .s, (bound by|waiting)", words(measured))
    edit(file, lambda line: {name: x for name, x in line.items() if name != "mma_flops"})
    assert "the rate of mma.sync is not recorded for this card" in words(open_page("masked_work", alg="fa2"))
    assert "no ceilings of A100 are recorded" in words(open_page("masked_work", card="80"))


SMALL = {"sq": "512", "sk": "512", "alg": "fa3", "batch": "1", "heads": "2"}
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=str(why_no_compiler()))


@needs_compiler
def test_without_a_recorded_trace_the_order_is_executed() -> None:
    app = open_page("masked_work", **SMALL)
    assert "no trace of the inside of such a thread block is recorded" in words(app)
    app.button(key="masked.inside").click().run(timeout=120)
    assert not app.exception
    said = words(app)
    assert "Executed on the CPU: order, not time." in said
    assert "of the softmax overlaps products" not in said  # that would be a statement about time
    assert "µs on one SM" not in said
    assert open_page("masked_work", alg="fa3", sq="65536", sk="65536").button(key="masked.inside").disabled
    assert "fa1_forward has no time stamps" in words(open_page("masked_work", alg="fa1"))


@needs_compiler
def test_a_recorded_trace_is_shown_with_its_sums(elsewhere: Path) -> None:
    problem = make(1, 1, 512, 128, "bfloat16", CAUSAL)
    trace = inside.execute(make_plan(problem, Device.typical("sm_90"), "fa3"))
    environment = {"device": "NVIDIA H200", "recorded": "2026-11-22T10:00:00", "arch": "sm_90"}
    heads = trace.logs.heads.copy()
    heads["start_ns"], heads["end_ns"] = heads["start_clock"], heads["end_clock"]
    logs = dataclasses.replace(trace.logs, heads=heads)
    folder = elsewhere / "records" / "inside"
    measured = dataclasses.replace(trace, clock="cycles", environment=environment, slowdown=1.125, logs=logs)
    inside.save(measured, folder)
    has(
        words(open_page("masked_work", **SMALL, d="128")),
        "µs on one SM",
        "warps that multiply wait",
        "of the softmax overlaps products",
        "in a special build: its run takes 12.5% longer than a run without stamps.",
    )
    (folder / "damaged.trace").write_text("nothing")
    open_page("masked_work", **SMALL, d="128")
