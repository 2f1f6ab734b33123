"""All pages over cards, suites and regimes of the shipped records: a number of another card has its name, a page shows
one value of each quantity, and no measurement beats a bound.

Numbers are traced to their records by leaving records out: what then changes on a page came from them.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from card_support import write_lines
from dashboard_page_support import SHIPPED, open_page, use_records
from streamlit.testing.v1 import AppTest

from cufa.dashboard.model import evidence
from cufa.dashboard.model.asked import Asked, figures
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.subject import problem_key
from cufa.dashboard.views import roofline_view, splits_view
from cufa.measure import cards

CARDS = {"nvidia-h200": "H200", "nvidia-h100-80gb-hbm3": "H100"}
SUITES = sorted(
    {
        (row["suite"], row["regime"])
        for name in CARDS
        for row in cards.read_lines(SHIPPED / f"{name}.jsonl")
        if "what" not in row
    }
)
_MASKED = {"alg": "fa3", "d": "128", "batch": "4", "heads": "16"}
OTHERS = {
    "decode": ("decode", {}),
    "decode, many": ("decode", {"batch": "16", "cached": "8192"}),
    "masked work": ("masked_work", _MASKED | {"sq": "4096", "sk": "4096"}),
    "masked work, shorter": ("masked_work", _MASKED | {"sq": "2048", "sk": "2048"}),
    "masked work, FA2": ("masked_work", _MASKED | {"alg": "fa2", "sq": "4096", "sk": "4096"}),
    "two kernels": ("masked_work", _MASKED | {"sq": "4096", "sk": "4096", "two": "1", "b_alg": "fa2"}),
}
"""Pages with a card to predict for."""
KEYS = {"80": "A100", "90": "H200", "90-h100": "H100", "100": "B200"}
TIMES = "p10_ns", "p50_ns", "p90_ns", "low_ns", "high_ns"
PERCENT = re.compile(r"(\d+)% of (?:the limit|the bound|its ceiling)")


def without_card(name: str, folder: Path) -> Path:
    """The shipped records but for one card's."""
    for file in SHIPPED.rglob("*"):
        link = folder / file.relative_to(SHIPPED)
        if file.is_file() and not file.name.startswith(name) and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return folder


def with_slower(rows: Iterable[Measurement], folder: Path) -> Path:
    """The shipped records, in which these rows took 3% longer."""
    slower = {json.dumps(m.row.json) for m in rows}
    without_card("*", folder)
    for file in folder.glob("*.jsonl"):
        lines = cards.read_lines(file)
        file.unlink()
        times = ({x: 1.03 * line[x] for x in TIMES} if json.dumps(line) in slower else {} for line in lines)
        write_lines(file, [{**line, **new} for line, new in zip(lines, times, strict=True)])
    return folder


def leaves(block: Any) -> Iterator[Any]:
    for child in block.children.values():
        yield from leaves(child) if hasattr(child, "children") else [child]


def sections(app: AppTest) -> list[list[str]]:
    """What a page says and draws, without its controls: texts, rows of tables and curves, one list from each header to
    the next."""
    found: list[list[str]] = [[]]
    for leaf in leaves(app.main):
        if leaf.type == "header":
            found.append([])
        if leaf.type == "html":
            found[-1].append(leaf.proto.body)
        elif leaf.type in ("markdown", "caption", "info", "warning", "error", "header", "subheader"):
            found[-1] += leaf.value.splitlines()
        elif leaf.type == "arrow_data_frame":
            found[-1] += [json.dumps(row) for row in leaf.value.astype(str).to_dict("records")]
        elif leaf.type == "plotly_chart":
            drawn = json.loads(leaf.proto.spec)["data"]
            found[-1] += [leaf.proto.alt, *(json.dumps(trace) for trace in drawn)]
    return found


def changed(page: list[list[str]], other: list[list[str]]) -> list[list[str]]:
    """By section, what only the first page has."""
    there = {text for section in other for text in section}
    return [[text for text in section if text not in there] for section in page]


def losers(of: Evidence, asked: Asked) -> list[Measurement]:
    """Rows of a quantity that another row stands for, but for the row that sets the card's read ceiling."""
    kept = {id(m) for m in figures(of.rows, asked)}
    rate = 0.999 * of.read_bytes
    lost = (m for m in of.rows if id(m) not in kept)
    return [m for m in lost if not m.operation.memory_bound or m.row.json["io_bytes"] / m.seconds < rate]


class Faults:
    """What is wrong on a page. Records without a card, or with slower rows, are made once."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.shipped: dict[str, list[list[str]]] = {}

    def page(self, name: str, link: dict[str, str], records: Path | None = None) -> list[list[str]]:
        """With these records. With the records of the package, each page is opened once."""
        if records is None and (found := self.shipped.get(f"{name} {link}")):
            return found
        use_records(records or SHIPPED, self.monkeypatch)
        page = sections(open_page(name, **link))
        if records is None:
            self.shipped[f"{name} {link}"] = page
        return page

    def beyond(self, name: str, link: dict[str, str]) -> list[str]:
        """Texts with a share of a bound above 100%."""
        said = (text for section in self.page(name, link) for text in section)
        return [text for text in said if any(int(n) > 100 for n in PERCENT.findall(text))]

    def nameless(self, name: str, link: dict[str, str], card: str) -> list[str]:
        """Texts that come from another card's records, in a section that does not name the card."""
        other = without_card(card, self.folder / card)
        before, after = self.page(name, link), self.page(name, link, other)
        both = zip(before, changed(before, after), strict=True)
        unnamed = (only for section, only in both if not any(CARDS[card] in text for text in section))
        return [text for only in unnamed for text in only]

    def second_values(self, name: str, link: dict[str, str]) -> list[str]:
        """Texts that come from rows for whose quantity another row stands, but for the comparison of days."""
        use_records(SHIPPED, self.monkeypatch)
        asked = Asked(suite=link.get("suite", ""))
        lost = [*evidence.past(), *(m for e in evidence.load() for m in losers(e, asked))]
        slower = Path(tempfile.mkdtemp(dir=self.folder))
        before, after = self.page(name, link), self.page(name, link, with_slower(lost, slower))
        return [text for x in changed(before, after) for text in x if "Two cards, or two days" not in x]


@pytest.fixture(scope="module")
def changed_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of changed records: those without a card are read once."""
    return tmp_path_factory.mktemp("changed")


@pytest.fixture
def faults(shipped: Path, changed_records: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(changed_records, monkeypatch)


def measured(page: str, card: str, suite: str, regime: str) -> dict[str, str]:
    """A link to what a suite measured in a regime."""
    rows = next(e for e in evidence.load() if e.name == card).rows
    row = max((m for m in rows if (m.suite, m.regime) == (suite, regime)), key=lambda m: m.kernel is not None)
    if page == "compare":
        return {"machine": f"recorded:{row.machine}", "regime": regime, "shapes": row.family}
    return {"machine": card, "suite": suite, "of": problem_key(row.problem), "regime": regime}


@pytest.mark.sampled(fixed=0, dated=3)
@pytest.mark.parametrize(("suite", "regime"), SUITES)
@pytest.mark.parametrize("page", ["roofline", "compare"])
@pytest.mark.parametrize("card", CARDS)
def test_measured_pages(page: str, card: str, suite: str, regime: str, faults: Faults) -> None:
    link = measured(page, card, suite, regime)
    assert faults.beyond(page, link) == []
    assert faults.nameless(page, link, next(name for name in CARDS if name != card)) == []
    assert faults.second_values(page, link) == []


@pytest.mark.sampled(fixed=0, dated=2)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("key", KEYS)
def test_pages_of_a_card(name: str, key: str, faults: Faults) -> None:
    page, link = OTHERS[name]
    assert faults.beyond(page, link | {"card": key}) == []
    for other in (x for x in CARDS if CARDS[x] != KEYS[key]):
        assert faults.nameless(page, link | {"card": key}, other) == []
    assert faults.second_values(page, link | {"card": key}) == []


# --- Planted faults ---------------------------------------------------------------------------------------


def test_a_page_that_picks_by_itself_is_found(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_view, "figures", lambda found, asked: [m for m in found if asked.is_of(m)])
    assert faults.second_values("roofline", measured("roofline", "nvidia-h200", "energy", "sustained"))


def test_another_card_without_a_name_is_found(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits_view, "unlike", lambda *_: "")
    monkeypatch.setattr(Measurement, "where", "a card")
    assert any(faults.nameless("decode", {"card": "80"}, name) for name in CARDS)


def test_a_bound_of_another_session_is_found(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    link = measured("roofline", "nvidia-h200", "decode", "in turns")
    monkeypatch.setattr(Measurement, "bound", property(lambda m: (1.1 * m.seconds, "memory")))
    assert faults.beyond("roofline", link)
