"""Glossary terms and source lines in a real Chromium: by mouse, by keyboard, in a narrow window."""

from __future__ import annotations

import pytest
from dashboard_browser import PATIENCE, Visit, screenshot
from playwright.sync_api import Browser, Locator, expect

from cufa.dashboard import glossary


def tip(word: Locator) -> str:
    """The visible explanation of a word; "none" without one."""
    return str(word.evaluate("e => getComputedStyle(e, '::after').content")).strip('"')


@pytest.mark.in_turn
def test_a_word_tells_what_it_means_to_mouse_and_keyboard_and_a_step_its_lines(
    server: str, browser: Browser
) -> None:
    visit = Visit(browser)
    page = visit.open(server)
    word = page.locator(".cufa-verdict .cufa-term", has_text="device memory").first
    expect(word).to_be_visible(timeout=PATIENCE)
    assert tip(word) == "none"
    word.hover()
    assert tip(word) == glossary.TERMS["device memory"]
    page.mouse.move(0, 0)
    assert tip(word) == "none"
    word.focus()
    assert tip(word) == glossary.TERMS["device memory"]
    page.get_by_text("The source lines of cufa's FA2 kernel").click()
    expect(page.get_by_text("Alg. 1, l. 4 and 7").first).to_be_visible(timeout=PATIENCE)
    page.get_by_role("tab", name="Rescale").click()
    expect(page.get_by_text("the row maxima").first).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Glossary").click()
    expect(page.get_by_text(glossary.TERMS["wave"])).to_be_visible(timeout=PATIENCE)
    screenshot(page, "glossary-light")
    visit.close()
