"""Links between pages: their parameters, and the subject that each target page shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from dashboard_page_support import has, open_page, parameters, without_compiler, words
from dashboard_support import DEVICE, LIMITS, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.commands.common import seconds_text
from cufa.dashboard.model import devices
from cufa.dashboard.model.subject import Subject, problem_key, problem_of, sample
from cufa.dashboard.views import links
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure.cases import Work
from cufa.measure.decode_cases import make_decode
from cufa.measure.suites import SUITES
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import Problem, default_scale

LABELS = {label: page for page, (label, *_) in links._PAGES.items()}


def forward(dtype: str = "bfloat16", precision: str = "native", **changes: object) -> Problem:
    problem = Problem(2, 8, 2, 3000, 5000, 72, dtype, CAUSAL, default_scale(72), precision=precision)
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


def subject(problem: Problem, algorithm: str, card: str = "90") -> Subject:
    splits = None if problem.operation == "decode" else 1  # pages show unsplit forwards
    plan = make_plan(problem, Device.typical(int(card)), algorithm, num_splits=splits)
    return Subject(problem, plan.spec.name, plan.config, card)


SUBJECTS = {
    "gqa": subject(forward(), "fa2"),
    "window": subject(forward(mask=Band(300, None, -200), softcap=30.0), "fa3"),
    "numbers": subject(forward("float16", mask=Band(0, 7, "top-left")), "fa1", "80"),
    "float32": subject(forward("float32", "float32", mask=FULL), "fa2"),
    "no skip": subject(forward("float32", "tf32"), "fa2_noskip"),
    "one query": subject(forward(seqlen_q=1), "fa2", "86"),
    "backward": subject(forward(operation="backward"), "fa2"),
    "decode": subject(make_decode(3, 16, 4, 5000, tokens=2, head_dim=64, softcap=20.0), "auto"),
    "window of a cache": subject(make_decode(1, 8, 8, 4096, mask=Band(99, 0)), "fixed", "80"),
    "8-bit cache": subject(make_decode(1, 32, 8, 4096, cache_dtype="float8_e4m3"), "auto"),
}


def shown(app: AppTest) -> dict[str, dict[str, str]]:
    """Parameters of the enabled links of a page, by target page."""
    found = {}
    for element in app.get("page_link"):
        page = LABELS.get(element.proto.label)
        if page is not None and not element.proto.disabled:
            found[page] = dict(parse_qsl(element.proto.query_string, keep_blank_values=True))
    return found


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H200."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: Device("H200", DEVICE.arch, 132))


@pytest.mark.sampled(fixed=4, dated=2)
@pytest.mark.parametrize(
    ("name", "here"), [(name, page) for name, found in SUBJECTS.items() for page in links.pages_of(found)]
)
def test_a_page_says_the_subject_back_that_a_link_brought(
    name: str, here: str, elsewhere: Path, gpu_here: None
) -> None:
    found = SUBJECTS[name]
    if here == "occupancy":
        without_compiler()
    if here == "run" and found.card != "90":
        # What runs on the GPU that is here.
        found = subject(found.problem, KERNELS[found.kernel or ""].algorithm)
    write_evidence(elsewhere / "records")
    app = open_page(here, **links.link(here, found))
    assert not app.warning, [w.value for w in app.warning]
    others = [page for page in links.pages_of(found) if page != here]
    wanted = {page: links.link(page, found) for page in others}
    told = shown(app)
    if here == "roofline":  # the page has a shape, but no card
        for carried in wanted.values():
            carried.pop("card", None)
        for carried in (*wanted.values(), *told.values()):
            carried.pop("arch", None)
    assert told == wanted


@pytest.mark.parametrize("name", ["float32", "window"])
def test_a_link_replaces_what_a_page_remembers(name: str) -> None:
    app = open_page("masked_work", alg="fa1", mask="window", left="5", softcap="9", two="1", dtype="float16")
    app.switch_page("screens/decode.py").run()
    app.query_params.clear()
    found = SUBJECTS[name]
    for key, value in links.link("masked_work", found).items():
        app.query_params[key] = value
    app.switch_page("screens/masked_work.py").run()
    assert not app.warning
    assert shown(app)["occupancy"] == links.link("occupancy", found)
    assert "two" not in parameters(app)


def test_a_recorded_row_is_chosen_on_the_roofline(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    (case, *_) = (c for c in SUITES["forward"].cases(DEVICE) if c.problem.mask == CAUSAL)
    found = subject(case.problem, "fa3")
    link = links.link("roofline", found)
    assert link["suite"] == "forward"
    app = open_page("roofline", **link)
    assert not app.warning
    least = seconds_text(LIMITS.floor(case.problem, Work.of(case.problem))[0])
    has(words(app), "Recorded for this shape on Made-up GPU, 2026-01-02: fa3 ", f"at best {least}, by ")
    assert app.selectbox(key="roofline.shape").value == f"fa3, {case.problem}"
    elsewhere_recorded = open_page("roofline", **links.link("roofline", SUBJECTS["gqa"]))
    assert "No time of this shape is recorded" in words(elsewhere_recorded)


@pytest.mark.parametrize("page", ["compare", "history"])
def test_measured_rows_lead_to_the_other_pages(page: str, elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    found = shown(open_page(page))
    assert {"run", "roofline", "occupancy"} < set(found)
    for name in {"masked_work", "decode"} & set(found):
        assert not open_page(name, **found[name]).warning


def test_what_a_page_cannot_show_is_off_and_says_why() -> None:
    long = forward(seqlen_k=1 << 19)
    for page, found, why in (
        ("masked_work", Subject(long), "Lengths over 131,072"),
        ("masked_work", Subject(forward(), "naive"), "does not visit tiles"),
        ("occupancy", Subject(forward()), "not a kernel of cufa"),
        ("masked_work", Subject(forward("float64")), "float64"),
    ):
        with pytest.raises(ValueError, match=why):
            links.link(page, found)
    app = open_page("roofline", of=problem_key(long))
    assert not shown(app)  # without evidence the page has no subject
    off = [e.proto for e in open_page("run", sk=str(1 << 19)).get("page_link") if e.proto.disabled]
    assert "Lengths over 131,072" in next(x.help for x in off if x.label == "Masked work of this")


def test_every_problem_has_one_word() -> None:
    every = [case.problem for suite in SUITES.values() for case in suite.cases(DEVICE)]
    every += [found.problem for found in SUBJECTS.values()]
    every += [sample(spec.operation) for spec in KERNELS.values()]
    scored = next(p for p in every if p.score is not None)
    with pytest.raises(ValueError, match="cannot carry a score function"):
        problem_key(scored)
    every = [p for p in every if p.score is None]
    too_long = [p for p in every if str(p.mask).startswith(("eviction", "full, columns"))]
    assert len(too_long) > 1
    for problem in too_long:  # as many numbers as keys
        with pytest.raises(ValueError, match="more numbers than a link holds"):
            problem_key(problem)
    bits = [p for p in every if p.mask.irregular_kind == "bits"]
    assert bits
    for problem in bits:
        with pytest.raises(ValueError, match="cannot be set on that page"):
            problem_key(problem)
    for problem in (p for p in every if p not in too_long and p not in bits):
        key = problem_key(problem)
        assert problem_key(problem_of(key)) == key
        again = problem_of(key)
        not_in_links = {"lengths", "alignment", "scale", "deterministic"}
        same = {f.name for f in dataclasses.fields(Problem)} - not_in_links
        assert all(getattr(again, name) == getattr(problem, name) for name in same), problem


BAD_WORDS = (
    "",
    "forward",
    "sideways__4__16__16__4096__4096__128__bfloat16.native__none.0.bottom-right__none",
    "forward__4__16__5__4096__4096__128__bfloat16.native__none.0.bottom-right__none",
    "forward__4__16__16__0__4096__128__bfloat16.native__none.0.bottom-right__none",
    "forward__4__16__16__4096__4096__100__bfloat16.native__none.0.bottom-right__none",
    "forward__4__16__16__4096__4096__128__int3.native__none.0.bottom-right__none",
    "forward__4__16__16__4096__4096__128__bfloat16.great__none.0.bottom-right__none",
    "forward__4__16__16__4096__4096__128__bfloat16.native__-1.0.bottom-right__none",
    "forward__4__16__16__4096__4096__128__bfloat16.native__none.0.sideways__none",
    "forward__4__16__16__4096__4096__128__bfloat16.native__none.0.bottom-right__nan",
    "forward__4__16__16__4096__4096__128__bfloat16.native__none.0.bottom-right__none__64",
    "decode__4__16__16__1__4096__128__bfloat16.native__none.0.bottom-right__none",
)


@pytest.mark.parametrize("text", BAD_WORDS)
def test_a_bad_word_is_told(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        problem_of(text)
