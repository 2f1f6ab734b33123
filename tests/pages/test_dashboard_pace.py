"""A page that is served lets the browser draw its first sentence, or a visitor's first figure, before it goes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from dashboard_page_support import elsewhere, open_page  # noqa: F401 - a fixture among them

from cufa.dashboard import pace


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of a page that is served: how long each pause lasts, instead of the pause."""
    found: list[float] = []
    monkeypatch.setattr(pace, "_is_served", True)
    monkeypatch.setattr(pace, "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_first_page_waits_after_its_figure_and_an_answer_after_its_sentence(waits: list[float]) -> None:
    app = open_page("masked_work")
    assert waits == [pace._LASTING[pace.FIGURE], pace._LASTING[pace.DESCRIPTION]]
    app.run()
    assert waits[2:] == [pace._LASTING[pace.SENTENCE]]


def test_nobody_waits_for_a_page_that_is_not_served(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_is_served", False)
    open_page("masked_work").run()
    assert waits == []
