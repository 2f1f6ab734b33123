"""The page Masked work under Streamlit's AppTest."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from card_support import edit
from conftest import why_no_compiler
from dashboard_page_support import alts, chosen, figures, has, open_page, parameters, words
from dashboard_support import DEVICE, make_trace, write_evidence

from cufa.dashboard.model import devices
from cufa.gpu.architectures import Device
from cufa.measure import inside, traces
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL

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


def test_an_algorithm_that_the_card_does_not_run_is_not_shown() -> None:
    app = open_page("masked_work", alg="fa3", card="80")
    assert "'fa3'" in app.warning[0].value
    assert parameters(app)["card"] == "80"


def test_tiles_that_would_be_too_many_are_made_larger_and_it_says_so() -> None:
    app = open_page("masked_work", sq="131072", tiles="custom", bq="16")
    assert "are too many" in app.warning[0].value


def test_no_trace_is_said_plainly() -> None:
    assert "no trace of this problem is recorded" in words(open_page("masked_work"))


def test_a_trace_stands_beside_the_prediction(elsewhere: Path) -> None:
    app = open_page("masked_work")
    save_trace(elsewhere)
    app.run()
    said = words(app)
    has(said, "agree with every row of the schedule", "NVIDIA H200", "recorded</span>")
    assert "measured</span>" not in said
    assert "The tail is as predicted" in said


def save_trace(elsewhere: Path, **environment: object) -> None:
    """A trace of the default view on an H200."""
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, "fa2")
    trace = make_trace(plan)
    trace.environment.update({"device": "NVIDIA H200", **environment})
    traces.save(trace, elsewhere / "records" / "traces")


@pytest.mark.parametrize(
    ("card", "environment"),
    [("80", {}), ("90x114", {}), ("90", {"device": "NVIDIA H100 80GB HBM3"})],
    ids=["another architecture", "fewer SMs", "another card of the architecture"],
)
def test_a_trace_of_another_card_is_shown_as_that_and_judges_nothing(
    card: str, environment: dict[str, str], elsewhere: Path
) -> None:
    save_trace(elsewhere, **environment)
    app = open_page("masked_work", card=card)
    assert not app.warning
    said = words(app)
    where = environment.get("device", "NVIDIA H200")
    has(said, f"On another card, {where}: ", "This says nothing about ")
    assert "The tail is" not in said
    assert "no trace of this problem is recorded" in said
    told = alts(app)
    assert not any("predicted, " in alt and "SMs sorted" in alt for alt in told)


def test_a_trace_of_this_machine_is_measured(elsewhere: Path) -> None:
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, "fa2")
    trace = make_trace(plan)
    trace.environment["device"] = "NVIDIA H200"
    traces.save(trace, elsewhere / "cache" / "traces")
    said = words(open_page("masked_work"))
    assert "measured</span>The kernel" in said
    assert "recorded</span>" not in said


def test_idle_time_is_told_by_sms_and_by_places(elsewhere: Path) -> None:
    """In the last wave, each SM has a block, and half of the places are empty."""
    said = words(open_page("masked_work", mask="full"))
    assert "2,048 thread blocks, 7.8 waves: 0% of SM time is idle at the end, 3.0% of the places" in said


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_disagreement_is_an_alarm(operation: str, elsewhere: Path) -> None:
    problem = dataclasses.replace(make(4, 16, 4096, 128, "bfloat16", CAUSAL), operation=operation)
    trace = make_trace(make_plan(problem, DEVICE, "fa2"))
    trace.records["tiles_visited"][7] += 1
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("masked_work", op=operation)
    assert "Alarm" in words(app)
    assert "1 of 2,048 records differ" in app.error[0].value


def test_a_recorded_trace_can_be_opened(elsewhere: Path) -> None:
    plan = make_plan(make(2, 4, 2048, 64, "bfloat16", CAUSAL), DEVICE, "fa1")
    trace = make_trace(plan)
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("masked_work")
    app.selectbox(key="masked.open").select(trace.name).run()
    assert app.selectbox(key="masked.open").value is None
    assert parameters(app)["alg"] == "fa1"
    assert app.number_input(key="masked.sq").value == 2048
    assert "agree with every row" in words(app)


def test_a_damaged_trace_is_named_and_the_page_goes_on(elsewhere: Path) -> None:
    folder = elsewhere / "records" / "traces"
    folder.mkdir(parents=True)
    (folder / "broken.trace").write_bytes(b"no trace")
    app = open_page("masked_work")
    assert "broken.trace" in app.warning[0].value


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


def test_a_tile_shows_its_softmax() -> None:
    app = open_page("masked_work", q="5", k="0")
    assert "first maximum" in words(app)
    app.number_input(key="masked.k").set_value(40).run()
    assert "is skipped" in words(app)
    assert chosen(app) == {"q": "5", "k": "40"}


def test_recorded_speedups_are_drawn(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions")
    app = open_page("masked_work")
    drawn = figures(app)
    names = [trace.get("name", "") for figure in drawn for trace in figure["data"]]
    assert any(name.startswith("Made-up GPU, float16") for name in names)
    assert "no measurement with and without skipping under window" in words(
        open_page("masked_work", mask="window")
    )
    assert any(name.startswith("Made-up GPU, float32") for name in names)
    said = words(app)
    assert "Made-up GPU, 2026-01-02, skipping alone, float16 d64, 4 heads, in turns: 1.50× at 512" in said
    assert (
        "Made-up GPU, 2026-01-02, FA1→FA2 with all changes, float16 d64, 4 heads, in turns: 2.50× at 512"
        in said
    )


def test_damaged_evidence_is_said_and_the_page_goes_on(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions").write_text('{"what": "tests"}')
    assert "cannot be read" in words(open_page("masked_work"))
    assert "cannot be read" in words(open_page("roofline"))


def test_tiles_are_sorted_by_predicted_time_and_measured_ones_show_the_error(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    file.write_text(file.read_text().replace("Made-up GPU", "NVIDIA H200"))
    app = open_page("masked_work", alg="fa3", batch="4", heads="16", d="128")
    table = next(e.value for e in app.dataframe if "bound by" in e.value)
    ratios = [float(x.removesuffix("×")) for x in table["÷ shortest"]]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert len(ratios) > 2
    assert set(table["bound by"]) <= {
        "products",
        "power",
        "exponentials",
        "shared memory",
        "memory",
        "busiest block",
    }
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


@pytest.fixture
def compiler() -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)


def test_without_a_recorded_trace_the_order_is_executed(elsewhere: Path, compiler: None) -> None:
    app = open_page("masked_work", **SMALL)
    assert "no trace of the inside of such a thread block is recorded" in words(app)
    app.button(key="masked.inside").click().run(timeout=120)
    assert not app.exception
    said = words(app)
    assert "Executed on the CPU: order, not time." in said
    assert "of the softmax overlaps products" not in said  # that would be a statement about time
    assert "µs on one SM" not in said


def test_a_kernel_without_stamps_says_so(elsewhere: Path) -> None:
    assert "fa1_forward has no time stamps" in words(open_page("masked_work", alg="fa1"))


def test_too_long_to_execute_is_said_before(elsewhere: Path) -> None:
    app = open_page("masked_work", alg="fa3", sq="65536", sk="65536")
    assert app.button(key="masked.inside").disabled


def test_a_recorded_trace_is_shown_with_its_sums(
    elsewhere: Path, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make(1, 1, 512, 128, "bfloat16", CAUSAL)
    trace = inside.execute(make_plan(problem, Device.typical("sm_90"), "fa3"))
    environment = {"device": "NVIDIA H200", "recorded": "2026-11-22T10:00:00", "arch": "sm_90"}
    heads = trace.logs.heads.copy()
    heads["start_ns"], heads["end_ns"] = heads["start_clock"], heads["end_clock"]
    logs = dataclasses.replace(trace.logs, heads=heads)
    folder = elsewhere / "inside"
    measured = dataclasses.replace(trace, clock="cycles", environment=environment, slowdown=1.125, logs=logs)
    inside.save(measured, folder)
    monkeypatch.setattr(inside, "INSIDE_DIR", folder)
    tiles = f"{trace.config.block_q}x{trace.config.block_kv}"
    app = open_page("masked_work", **{**SMALL, "d": "128"})
    said = words(app)
    assert not app.exception
    if "no trace of the inside" in said:
        pytest.fail(f"tiles {tiles} of the trace are not those that the page shows")
    has(
        said,
        "µs on one SM",
        "warps that multiply wait",
        "of the softmax overlaps products",
        "in a special build: its run takes 12.5% longer than a run without stamps.",
    )
    (folder / "damaged.trace").write_text("nothing")
    assert not open_page("masked_work", **{**SMALL, "d": "128"}).exception
