"""Looks of series, and plain answers to links, in a real Chromium."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import MASKED, Visit, assert_nothing_is_cut, screenshot
from playwright.sync_api import Browser, Page, expect

LOOKS = """number => Object.fromEntries(document.querySelectorAll('.js-plotly-plot')[number].data.map(
  trace => [trace.name, [trace.line?.color ?? trace.marker?.color ?? '', trace.marker?.pattern?.shape ?? '']]))"""


def looks(page: Page, number: int = 0) -> dict[str, list[str]]:
    """Colour and pattern of each series of one figure of the page."""
    page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot').length > {number}")
    found: dict[str, list[str]] = page.evaluate(LOOKS, number)
    return found


@pytest.mark.in_turn
def test_series_keep_their_look_and_waits_are_hatched(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/compare?machine=recorded:NVIDIA+H200&regime=in+turns")
    before = looks(page)
    page.get_by_role("radio", name="sustained", exact=True).click()
    expect(page.locator(".cufa-verdict", has_text="is the fastest sustained")).to_be_visible()
    visit.settle()
    after = looks(page)
    both = before.keys() & after.keys()
    assert len(both) > 1 and all(before[name] == after[name] for name in both)
    page.get_by_role("radio", name="energy", exact=True).click()
    expect(page.locator(".cufa-verdict", has_text="takes the fewest joules")).to_be_visible()
    page = visit.open(f"{server}/{MASKED}?alg=fa3&d=128&sq=2048&sk=2048&batch=2&heads=32")
    expect(page.get_by_role("figure", name="Measured on one SM")).to_be_visible()
    figures = page.locator(".js-plotly-plot").count()
    of_inside = next(x for x in (looks(page, n) for n in range(figures)) if "products" in x)
    waits = {name: look for name, look in of_inside.items() if name.startswith("waits")}
    assert waits and {pattern for _, pattern in waits.values()} == {"/"} and of_inside["products"][1] == ""
    visit.close()


@pytest.mark.in_turn
def test_links_that_lead_nowhere_are_answered_in_words(server: str, browser: Browser) -> None:
    visit = Visit(browser, width=800)
    visit.page.goto(f"{server}/rooflin")
    expect(visit.page.locator("body")).to_contain_text("The dashboard has no page at /rooflin. Its pages: ")
    visit.trouble.clear()  # the browser's own note on a 404
    visit.page.get_by_role("link", name="roofline").click()
    page = visit.settle()
    assert page.title() == "Roofline · cufa"
    page = visit.open(f"{server}/roofline?of=rubbish")
    notice = page.get_by_test_id("stAlert").filter(
        has_text="'rubbish', which is not a shape; the page ignores it"
    )
    expect(notice).to_be_visible()
    page = visit.open(f"{server}/history")
    page.get_by_role("radio", name="two whole runs").click()
    page.wait_for_url(re.compile(r"[?&]compare=runs\b"))
    visit.settle()
    expect(page.get_by_test_id("stAlert").filter(has_text="the link")).to_have_count(0)
    visit.close()


@pytest.mark.in_turn
def test_the_sidebar_shows_the_focus_and_labels_are_whole_at_800_pixels(
    server: str, browser: Browser
) -> None:
    visit = Visit(browser, width=1360)
    page = visit.open(f"{server}/roofline")
    link = page.get_by_test_id("stSidebarNavLink").nth(2)
    link.focus()
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outline")
    assert "solid" in outline and not outline.endswith(" 0px")
    screenshot(page, "focus")
    assert_nothing_is_cut(page, 800)
    visit.close()
