"""Masked work, inside a block, in a real Chromium."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import pytest

for _package in ("streamlit", "plotly", "playwright"):
    pytest.importorskip(_package, reason=f"the browser test needs {_package}: pip install 'cufa[dev]'")

from conftest import why_no_compiler  # noqa: E402
from dashboard_browser import (  # noqa: E402, F401 - fixtures among them
    CHROMIUM,
    MASKED,
    Visit,
    assert_nothing_is_cut,
    browser,
    runs,
    screenshot,
    server,
)
from playwright.sync_api import Browser, expect  # noqa: E402

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_lanes_of_an_executed_block(server: str, browser: Browser, theme: str, width: int) -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)
    visit = Visit(browser, theme, width)
    page = visit.open(f"{server}/{MASKED}?alg=fa3&sq=512&sk=512&batch=1&heads=1")
    page.get_by_role("button", name="Execute one head here").click()
    said = page.locator(".cufa-verdict", has_text="Executed on the CPU: order, not time")
    expect(said).to_be_visible(timeout=60_000)
    visit.settle()
    figure = page.get_by_role("figure", name="Executed on a CPU, in order and not in time")
    expect(figure).to_be_visible()
    figure.scroll_into_view_if_needed()
    expect(figure.get_by_text("producer").first).to_be_visible()
    expect(figure.get_by_text("consumer").first).to_be_visible()
    expect(figure.locator(".legendtext", has_text="products in flight")).to_be_visible()
    assert figure.locator(".bars .point").count() > 20
    assert_nothing_is_cut(page, width)
    screenshot(page, f"masked_work-inside-{theme}")
    visit.close()
