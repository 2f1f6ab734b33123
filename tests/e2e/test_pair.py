"""Masked work with two views side by side, in a real Chromium."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import MASKED, Visit, place_of, screenshot
from playwright.sync_api import Browser, expect


@pytest.mark.in_turn
def test_two_are_put_side_by_side_zoom_together_and_the_link_carries_both(
    server: str, browser: Browser
) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=2048&sk=2048")
    page.get_by_text("Compare with a second one").click()
    page.wait_for_url(re.compile(r"[?&]two=1\b"))
    visit.settle()
    beside = page.locator(".st-key-controls-beside")
    expect(beside.get_by_role("radio", name="FA3", exact=True)).to_be_checked()
    beside.get_by_role("radio", name="FA2, no skip", exact=True).click()
    page.wait_for_url(re.compile(r"[?&]b_alg=fa2_noskip\b"))
    visit.settle()
    beside.get_by_role("radio", name="window", exact=True).click()
    page.wait_for_url(re.compile(r"[?&]b_mask=window\b"))
    visit.settle()
    said = page.locator(".cufa-verdict", has_text="the arithmetic of FA2 128×64, causal")
    expect(said).to_be_visible()
    grids = page.get_by_role("figure", name="Two grids of tiles")
    expect(grids).to_be_visible()
    expect(grids.locator(".layer-below image, .imagelayer image")).to_have_count(2)
    screenshot(page, "masked_work-pair-light")
    page.set_viewport_size({"width": 1360, "height": 1600})
    box = place_of(grids.locator(".nsewdrag").first)
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] * 0.25)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5, steps=5)
    page.mouse.up()  # both grids zoom together
    layout = "document.querySelector('.js-plotly-plot')._fullLayout"
    page.wait_for_function(f"{layout}.xaxis.range[0] > 400 && {layout}.xaxis.range[1] < 1200")
    page.wait_for_function(f"String({layout}.xaxis.range) == String({layout}.xaxis2.range)")
    page.wait_for_function(f"String({layout}.yaxis.range) == String({layout}.yaxis2.range)")
    visit.close()
