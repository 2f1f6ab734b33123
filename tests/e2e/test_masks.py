"""The mask editor of Masked work, in a real Chromium."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import MASKED, Visit, place_of, screenshot
from playwright.sync_api import Browser, expect


@pytest.mark.in_turn
def test_a_mask_is_made_by_hand_and_its_link_is_passed_on(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=2048&sk=2048")
    page.get_by_role("radio", name="prefix", exact=True).click()
    page.wait_for_url(re.compile(r"[?&]mask=prefix\b"))
    visit.settle()
    caption = page.get_by_text(re.compile(r"^Mask: causal prefix \d+")).first
    expect(caption).to_contain_text("causal prefix 512.")
    bar = page.locator("[data-testid=stSlider]").first  # dragged, the number follows and the picture with it
    box = place_of(bar)
    thumb = place_of(bar.get_by_role("slider"))
    page.mouse.move(thumb["x"] + thumb["width"] / 2, thumb["y"] + thumb["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, thumb["y"] + thumb["height"] / 2, steps=6)
    page.mouse.up()
    page.wait_for_url(re.compile(r"[?&]length=1[0-9]{3}\b"))
    visit.settle()
    typed = page.get_by_role("spinbutton", name="Keys visible to all").input_value()
    assert 1300 < int(typed.replace(",", "")) < 1800
    expect(caption).to_contain_text(f"causal prefix {int(typed)}.")

    page.get_by_role("radio", name="documents", exact=True).click()
    page.wait_for_url(re.compile(r"[?&]mask=documents\b"))
    visit.settle()
    lengths = page.get_by_role("textbox", name="Lengths of the documents")
    picture = page.get_by_role("img", name="The mask over 2,048 queries")
    before = picture.get_attribute("src")
    assert before is not None
    lengths.fill("300 apples")
    lengths.press("Control+Enter")
    expect(page.get_by_role("alert").filter(has_text="'apples' is not a whole number")).to_be_visible()
    lengths.fill("700\n300\n4x200")
    lengths.press("Control+Enter")
    page.wait_for_url(re.compile(r"[?&]lengths=700(%2C|,)300(%2C|,)4x200"))
    visit.settle()
    expect(page.get_by_text("6 documents of 200 to 700 tokens.")).to_be_visible()
    expect(page.get_by_text("is not a whole number")).to_have_count(0)
    expect(picture).not_to_have_attribute("src", before)
    grid = page.get_by_role("figure", name="Grid of 16 query blocks")
    page.set_viewport_size({"width": 1360, "height": 1800})  # for the mouse to reach it
    box = place_of(grid.locator(".nsewdrag").first)
    page.mouse.move(box["x"] + box["width"] * 0.03, box["y"] + box["height"] * 0.03, steps=3)
    expect(grid.locator(".hoverlayer")).to_contain_text("query block 0, key block")
    page.get_by_text("All kinds of masks in pictures").click()
    for name in ("causal", "shared question", "columns"):
        kind = page.get_by_role("img", name=name, exact=True)
        expect(kind).to_be_visible()
        assert kind.evaluate("image => image.naturalWidth") == 96
    screenshot(page, "masked_work-editor-light")
    visit.close()
