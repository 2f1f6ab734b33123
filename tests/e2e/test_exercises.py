"""The page Exercises in a real Chromium: a wrong answer, its reason, and the right answer."""

from __future__ import annotations

import pytest
from dashboard_browser import Visit, assert_nothing_is_cut, screenshot
from playwright.sync_api import Browser, Page, expect
from sampling import of_today


def check(page: Page) -> None:
    page.get_by_role("button", name="Check my answer").click()


@pytest.mark.in_turn
def test_a_swizzle_is_found_by_its_banks(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/exercises?exercise=swizzle")
    check(page)
    expect(page.get_by_role("alert")).to_contain_text("8 of 8 rows of an ldmatrix lie in the same banks")
    for name, value in (("How many bits", "3"), ("XORed with", "3")):
        page.get_by_role("radiogroup", name=name).get_by_role("radio", name=value, exact=True).click()
        visit.settle()
    expect(page.get_by_role("alert")).to_have_count(0)  # the answer has changed
    table = page.get_by_role(
        "img", name="Banks of each unit: row 0: [0, 1, 2, 3, 4, 5, 6, 7]; row 1: [1, 0, 3, 2"
    )
    expect(table).to_be_visible()
    check(page)
    expect(page.get_by_role("status")).to_contain_text("no bank conflict")
    expect(page.get_by_text("1 of 6 solved: A swizzle.")).to_be_visible()
    screenshot(page, "exercises-swizzle-light")
    visit.close()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "name", of_today(["tiles", "order", "tile", "ragged", "race", "swizzle"], "exercise")
)
def test_nothing_is_cut_at_any_width(server: str, browser: Browser, name: str) -> None:
    visit = Visit(browser, of_today(["light", "dark"], "theme of exercises", fixed=0)[0])
    page = visit.open(f"{server}/exercises?exercise={name}")
    check(page)
    expect(page.get_by_role("alert")).to_contain_text("Not yet.")
    for width in (1440, 800, 390):
        assert_nothing_is_cut(page, width)
    visit.close()
