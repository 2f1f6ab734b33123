"""Every page under Streamlit's AppTest, with and without a GPU and evidence; links."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl

import pytest
from card_support import write_lines
from dashboard_page_support import PAGES, chosen, has, open_page, parameters, without_compiler, words
from dashboard_support import APP, write_evidence
from streamlit import cache_data
from streamlit.elements.lib import policies

from cufa.dashboard import glossary
from cufa.dashboard.model import doctor
from cufa.doctor import Check
from cufa.doctor import Status as CheckStatus
from cufa.measure.cards import read_lines


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_gpu_and_evidence(name: str) -> None:
    """The first run tells of a parameter that is no control; the glossary lists all terms, and headings and metrics
    have help on their terms."""
    app = open_page(name, nonsense="1")
    assert "'nonsense'" in app.warning[0].value
    app.run()
    assert app.title and not app.warning
    assert "cufa-verdict" in words(app)
    assert chosen(app) == {}
    listed = "\n".join(x.value for x in app.sidebar.markdown)
    for term, meaning in glossary.TERMS.items():
        assert f"**{term}**: {meaning}" in listed, term
    titled = [(x.value, x.help) for x in (*app.header, *app.subheader)]
    titled += [(x.label, x.help) for x in app.metric]
    for text, told in titled:
        for term in glossary.terms_in(text):
            assert glossary.TERMS[term] in (told or ""), (text, term)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_with_gpu_and_evidence(name: str, elsewhere: Path, with_gpu: None) -> None:
    write_evidence(elsewhere / "records")
    app = open_page(name)
    assert app.title
    assert "cufa-verdict" in words(app)


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("compare", "machine", "recorded:Made-up GPU"),
        ("roofline", "machine", "made-up-gpu"),
        ("decode", "record", "made-up-gpu, in turns"),
        ("history", "a", "made-up-gpu.forward.0"),
    ],
)
def test_pages_begin_with_what_was_measured_of_todays_kernels(
    name: str, parameter: str, value: str, elsewhere: Path
) -> None:
    """Even if another card has more rows."""
    file = write_evidence(elsewhere / "records", with_loads=False)
    lines = [
        {**line, **({"device": "Another GPU"} if line.get("what") == "session" else {"digest": "0" * 64})}
        for line in read_lines(file)
        if line.get("what") != "ceilings"
    ]
    more = [{**line, "suite": "energy"} for line in lines if line.get("suite") == "forward"]
    write_lines(file.with_name("another.jsonl"), [
        {n: x for n, x in line.items() if n != "digest" or "what" not in line} for line in [*lines, *more]
    ])  # fmt: skip
    assert parameters(open_page(name))[parameter] == value


def test_the_first_page_of_a_server_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit warns once per process about a field with both a value and a default; not in an AppTest."""
    options = tomllib.loads((Path(APP).parent / ".streamlit" / "config.toml").read_text()).get("global", {})
    warned: list[object] = []
    monkeypatch.setattr(policies, "runtime", SimpleNamespace(exists=lambda: True))
    monkeypatch.setattr(policies, "_shown_default_value_warning", False)
    monkeypatch.setattr(policies._LOGGER, "warning", lambda *told, **_: warned.append(told))
    config = SimpleNamespace(get_option=lambda name: options.get(name.removeprefix("global."), False))
    monkeypatch.setattr(policies, "config", config)
    open_page("understand")
    assert not warned


BAD = {
    "masked_work": "sq=banana sq=0 sq=999999999999 sk=-5 alg=fa9 kv=7 card=70 tiles=1x1 q=32 "
    "mask=<script>alert(1)</script> diag=middle softcap=0 softcap=-30 softcap=nan left=5 b_alg=fa2",
    "masked_work?mask=window": "left=-1 left=1.5 right=many",
    "masked_work?mask=documents": "lengths=12a",
    "masked_work?mask=columns": "hidden=5-3:1-2",
    "masked_work?mask=evict": "rows=no",
    "masked_work?mask=prefix": "length=-1",
    "masked_work?mask=chunks": "size=0",
    "masked_work?mask=streaming": "keep=1.5",
    "masked_work?mask=global_window": "left=few",
    "masked_work?two=1": "b_alg=fa9",
    "masked_work?card=80": "alg=fa3",
    "decode": "mask=full batch=1e3",
    "occupancy": "kernel=none arch=70 of=rubbish",
    "machine_code": "of=rubbish",
    "roofline": "of=rubbish",
    "run": "run=20200101T000000.000000-000000 run=../../etc/passwd on=cuda:0 kernels=fa2,fa9 preset=suite-forward "
    "tiles=1x1 d=-8 seconds=1e9 also=3 regime=asleep op=sideways mask=lattice",
    "compare": "table=none",
    "doctor": "show=none",
    "understand": "step=17 step=0 mask=diagonal algorithm=fa9 seed=-1",
}
"""Parameters that a page cannot show, by a link to the page. A control that the page lacks is named without a value."""


@pytest.mark.sampled(fixed=2, dated=8)
@pytest.mark.parametrize(("link", "bad"), [(link, bad) for link, told in BAD.items() for bad in told.split()])
def test_a_bad_value_falls_back_and_says_so(link: str, bad: str) -> None:
    name, _, more = link.partition("?")
    (parameter, _, value), valid = bad.partition("="), dict(parse_qsl(more))
    if name == "occupancy":
        without_compiler()
    app = open_page(name, **valid, **{parameter: value})
    (warning,) = app.warning
    is_control = valid or parameter not in ("left", "b_alg")
    assert repr(value if is_control else parameter) in warning.value
    assert chosen(app).items() <= valid.items()


def test_a_link_carries_the_view_and_the_view_the_link() -> None:
    link = {
        "alg": "fa1", "mask": "full", "sq": "1000", "sk": "777", "heads": "6", "kv": "2", "d": "64",
        "q": "3",
    }  # fmt: skip
    app = open_page("masked_work", **link)
    assert not app.warning
    assert chosen(app) == link
    assert app.number_input(key="masked.sq").value == 1000
    app.number_input(key="masked.sk").set_value(500).run()
    assert chosen(app) == {**link, "sk": "500"}
    app.number_input(key="masked.sk").set_value(4096).run()
    assert "sk" not in parameters(app)


def test_a_page_keeps_its_controls_when_it_is_left() -> None:
    app = open_page("masked_work")
    app.number_input(key="masked.sq").set_value(512).run()
    app.switch_page("screens/decode.py").run()
    app.query_params.clear()
    app.switch_page("screens/masked_work.py").run()
    assert app.number_input(key="masked.sq").value == 512
    assert chosen(app) == {"sq": "512"}


@pytest.mark.sampled(fixed=1, dated=2)
@pytest.mark.parametrize(
    ("link", "text"),
    [
        ({}, "causal"),
        ({"mask": "full"}, "full"),
        ({"diag": "top-left"}, "causal top-left"),
        ({"mask": "window"}, "window (1023, 0)"),
        ({"mask": "window", "left": "511", "right": "128"}, "window (511, 128)"),
        ({"mask": "window", "left": "none", "right": "7"}, "window (None, 7)"),
        ({"mask": "window", "diag": "at", "at": "-300"}, "window (1023, 0) diagonal -300"),
        ({"softcap": "30"}, "causal, softcap 30"),
    ],
)
def test_a_link_carries_any_mask(link: dict[str, str], text: str) -> None:
    app = open_page("masked_work", **link, sq="3000", sk="3000")
    assert not app.warning
    expected = {**link, "sq": "3000", "sk": "3000"}
    if "softcap" in link:
        expected["softcap"] = "30.0"
    assert chosen(app) == expected
    assert f"Mask: **{text}**" in words(app)
    assert any(
        f"under the mask {text.removesuffix(', softcap 30')}:" in e.proto.alt for e in app.get("plotly_chart")
    )


def test_the_sides_of_a_window_can_be_emptied_and_come_back() -> None:
    app = open_page("masked_work", mask="window", sq="512", sk="512")
    app.number_input(key="masked.left").set_value(None).run()
    assert parameters(app)["left"] == "none"
    assert "window (None, 0)" not in words(app)  # that would be causal
    app.number_input(key="masked.left").set_value(100).run()
    assert "window (100, 0)" in words(app)
    app.segmented_control(key="masked.mask").set_value("causal").run()
    assert "left" not in parameters(app)
    app.segmented_control(key="masked.mask").set_value("window").run()
    assert app.number_input(key="masked.left").value == 100


def test_options_that_look_alike_are_told_apart() -> None:
    """A browser sends the words of an option: equal words of two runs would select the wrong run."""
    from cufa.dashboard.link import distinct

    words = distinct({"latest": "the latest run", "b": "12:00:01 · fa2", "a": "12:00:01 · fa2"})
    assert words == {"latest": "the latest run", "b": "12:00:01 · fa2 (2)", "a": "12:00:01 · fa2"}
    assert list(words) == ["latest", "b", "a"]


def test_the_doctor_says_what_the_command_says_and_shows_problems_with_their_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("python", "kernel sources", "first call", "runs")
    has(words(open_page("doctor")), *(f"**{name}** |" for name in names), "against float64")
    made_up = [
        Check("python", CheckStatus.OK, "3"),
        Check("nvrtc", CheckStatus.PROBLEM, "too <old>", "pip install `x`"),
    ]
    monkeypatch.setattr(doctor, "_doctor", lambda: made_up)
    cache_data.clear()
    said = words(open_page("doctor", show="open"))
    has(said, "1 to fix: nvrtc.", "too <old>", "`x`")
    assert "**python**" not in said


def test_a_doctor_that_dies_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    (check,) = doctor._doctor()
    assert check.status is CheckStatus.PROBLEM
    assert "exit code 1" in check.detail
