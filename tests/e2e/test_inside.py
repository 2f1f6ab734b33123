"""Masked work, inside a block, in a real Chromium."""

from __future__ import annotations

import pytest
from conftest import why_no_compiler
from dashboard_browser import MASKED, Visit, assert_nothing_is_cut, screenshot
from playwright.sync_api import Browser, expect
from sampling import of_today


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("theme", "width"), of_today([("light", 1440), ("dark", 390)], "window of an executed block", fixed=0)
)
def test_lanes_of_an_executed_block(server: str, browser: Browser, theme: str, width: int) -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)
    visit = Visit(browser, theme, width)
    page = visit.open(f"{server}/{MASKED}?alg=fa3&sq=512&sk=512&batch=1&heads=1")
    page.get_by_role("button", name="Execute one head here").click()
    said = page.locator(".cufa-verdict", has_text="Executed on the CPU: order, not time")
    expect(said).to_be_visible()
    visit.settle()
    figure = page.get_by_role("figure", name="Executed on a CPU: order, not time")
    expect(figure).to_be_visible()
    figure.scroll_into_view_if_needed()
    expect(figure.get_by_text("producer").first).to_be_visible()
    expect(figure.get_by_text("consumer").first).to_be_visible()
    expect(page.get_by_text("products in flight (thin)").first).to_be_visible()
    assert figure.locator(".bars .point").count() > 20
    for narrower in (width, 390):
        assert_nothing_is_cut(page, narrower)
    page.set_viewport_size(visit.size)
    screenshot(page, f"masked_work-inside-{theme}")
    visit.close()
