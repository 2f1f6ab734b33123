"""What a kernel engineer reads, in a real Chromium: banks of shared memory, why a kernel is slow, regressions."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import Visit, assert_nothing_is_cut, screenshot
from playwright.sync_api import Browser, expect

WIDTHS = (1440, 800, 390)


@pytest.mark.in_turn
def test_banks_of_a_product_with_swizzle_on_and_off(server: str, browser: Browser) -> None:
    visit = Visit(browser, width=1440)
    page = visit.open(f"{server}/machine_code?kernel=fa3_forward&d=64&banks=1")
    expect(page.locator(".cufa-verdict", has_text="no bank conflict")).to_be_visible()
    page.get_by_role("radio", name="swizzle off").click()
    expect(page.locator(".cufa-verdict", has_text="8-way bank conflicts")).to_be_visible()
    page.wait_for_url(re.compile(r"[?&]layout=off\b"))
    visit.settle()
    expect(page.get_by_role("figure", name="Banks of wgmma")).to_be_visible()
    assert_nothing_is_cut(page, 390)
    visit.close()


@pytest.mark.in_turn
def test_roofline_says_why_and_history_finds_regressions(server: str, browser: Browser) -> None:
    visit = Visit(browser, theme="dark", width=800)
    page = visit.open(f"{server}/roofline?machine=nvidia-h200&suite=forward")
    expect(page.get_by_role("heading", name="Why, and what to try")).to_be_visible()
    expect(page.get_by_role("columnheader", name="at most")).to_be_visible()
    assert_nothing_is_cut(page, 800)
    page = visit.open(f"{server}/history?rm=NVIDIA+H200")
    page.get_by_text("Find the rows that became slower").click()
    expect(page.locator(".cufa-verdict", has_text="are slower,")).to_be_visible()
    page.get_by_text("Commits between").or_(page.get_by_text("lists the commits between")).first.wait_for()
    screenshot(page, "history-regressions")
    visit.close()
