"""What pages once told that was not so, in a real Chromium, by the links that showed it: beside the tests of single
pages, what this machine's own evidence makes of them."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import Visit, address_of
from playwright.sync_api import Browser, expect
from sampling import of_today

#: By page and link: what it must say, and what it must not.
TOLD = {
    ("masked_work", "card=80"): (
        r"On another card, NVIDIA H[12]00.*This says nothing about A100",
        r"The tail is",
    ),
    ("masked_work", "mask=full"): (r"3\.0% of the places' time is empty", r"0\.0% of SM time"),
    ("decode", "batch=64"): (r"GB in [0-9]+ µs", r"times? faster"),
    ("run", ""): (r"seqlen 2048×2048", r"seqlen 512×512"),
    ("run", "batch=4096&heads=1024&sq=1048576&sk=1048576"): (r"Too large for this machine", r"[0-9]{6} h"),
    ("compare", ""): (r"float32 at .* from FA1 to FA2 on .*; published", r"46\.74"),
    ("history", "compare=runs"): (r"B: ", r"nothing in common"),
}


@pytest.mark.in_turn
def test_what_pages_tell_is_so(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    for (name, link), (told, untrue) in of_today(list(TOLD.items()), "what is told", dated=3):
        page = visit.open(f"{server}/{address_of(name)}?{link}")
        body = page.locator("[data-testid=stMain]")
        expect(body).to_contain_text(re.compile(told))
        expect(body).not_to_contain_text(re.compile(untrue))
        if "1048576" in link:
            expect(page.get_by_role("button", name="Start")).to_be_disabled()
        if name == "decode":
            said = body.inner_text()
            least, seen = (
                re.search(r"at least ([0-9.]+) µs", said),
                re.search(r"Measured for this problem: ([0-9.]+) µs", said),
            )
            assert least and seen and float(least[1]) <= float(seen[1]), said
    visit.close()


@pytest.mark.in_turn
def test_the_first_two_choices_of_history_are_not_one_run(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{address_of('history')}?compare=runs")
    first, second = (
        page.get_by_role("combobox", name=x, exact=True).input_value() for x in ("Run A", "Run B")
    )
    assert first != second
    visit.close()
