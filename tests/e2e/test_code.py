"""The page Machine code in a real Chromium; and links from page to page."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import MASKED, Visit, screenshot
from playwright.sync_api import Browser, expect


@pytest.mark.in_turn
def test_a_build_is_taken_apart_and_a_line_shows_its_instructions(server: str, browser: Browser) -> None:
    pytest.importorskip("cuda.bindings", reason="compiling needs NVRTC: pip install 'cufa[cuda13]'")
    visit = Visit(browser)
    link = "kernel=fa2_forward&d=64&arch=80&as=ptx&file=shared/softmax.cuh"
    page = visit.open(f"{server}/machine_code?{link}")
    expect(page.locator(".cufa-verdict", has_text="issue slots of an SM").first).to_be_visible()
    page.wait_for_url(
        re.compile(r"[?&]as=ptx\b.*file=shared(%2F|/)softmax\.cuh")
    )  # though it came after the wait
    visit.settle()
    expect(page.get_by_role("figure", name="Bars of instructions by kind")).to_be_visible()
    line = page.get_by_role("spinbutton", name="Line", exact=True)
    line.fill("1")
    page.keyboard.press("Enter")
    expect(page.locator(".cufa-verdict", has_text="Line 1 has no instructions").first).to_be_visible()
    page.wait_for_url(re.compile(r"[?&]line=1\b"))
    visit.settle()
    screenshot(page, "machine_code-light")
    visit.close()


@pytest.mark.in_turn
def test_a_link_takes_the_shape_along(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=3000&sk=5000&mask=window&left=300&d=64&alg=fa3&b_alg=fa1")
    page.get_by_role("link", name="Roofline of this").click()
    page.wait_for_url(re.compile(r"/roofline\?.*of=forward__4__16__16__3000__5000__64__bfloat16"))
    visit.settle()
    expect(page.locator(".cufa-verdict", has_text="3000×5000")).to_be_visible()
    page.get_by_role("link", name="Run this").click()
    page.wait_for_url(re.compile(r"/run\?.*left=300"))
    visit.settle()
    expect(page.get_by_role("spinbutton", name="Keys before")).to_have_value("300")
    expect(page.get_by_role("spinbutton", name="Queries", exact=True)).to_have_value("3000")
    page.get_by_role("link", name="Masked work of this").click()
    page.wait_for_url(re.compile(r"/masked_work\?.*left=300"))
    visit.settle()  # until then, Run's own field of keys may be there too
    expect(page.get_by_role("spinbutton", name="Keys", exact=True)).to_have_value("5000")
    expect(page.get_by_role("radio", name="window", exact=True)).to_be_checked()
    visit.close()
