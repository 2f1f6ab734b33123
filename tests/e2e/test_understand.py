"""The page Understand in a real Chromium: playing and stepping without the server, and links."""

from __future__ import annotations

import re

import pytest
from dashboard_browser import Visit, screenshot
from playwright.sync_api import Browser, Page, expect


def at_step(page: Page, number: int) -> None:
    """Wait until the player is at this step."""
    expect(page.locator(".walk .place")).to_have_text(re.compile(rf"^step {number} of"))


def press_play_twice(page: Page) -> None:
    """Play and pause in one script: no step is played in between."""
    page.locator(".walk .play").evaluate("button => { button.click(); button.click(); }")


def own_meter(page: Page) -> int:
    return int(page.locator(".walk .own .bytes").inner_text().removesuffix(" B").replace(",", ""))


@pytest.mark.in_turn
def test_it_steps_and_the_link_brings_back_the_step(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/?mask=causal&seed=3&step=5")
    at_step(page, 5)
    before = own_meter(page)
    page.get_by_role("button", name="Next step").click()
    at_step(page, 6)
    assert own_meter(page) > before
    page.wait_for_url(re.compile(r"[?&]step=6\b"))
    page.get_by_role("button", name="Next step").click()
    expect(page.locator(".walk .phases")).to_contain_text("No key of 16–23 is visible to queries 8–15")
    page.wait_for_url(re.compile(r"[?&]step=7\b"))
    said = page.locator(".walk").inner_text()
    screenshot(page, "understand-skipped-light")
    page.reload()
    visit.settle()
    at_step(page, 7)
    assert page.locator(".walk").inner_text() == said
    visit.close()


@pytest.mark.in_turn
def test_it_plays_from_the_first_step_to_the_last_without_the_server(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    sent: list[object] = []
    visit.page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(frame)))
    page = visit.open(f"{server}/?algorithm=decode&splits=2&step=7")
    before = len(sent)
    page.get_by_role("combobox", name="Speed").select_option("2×")
    page.get_by_role("button", name="Play", exact=True).click()
    at_step(page, 9)
    page.get_by_role("button", name="Play", exact=True).wait_for()  # at the end
    expect(page.locator(".walk")).to_contain_text("equal the plain softmax")
    page.wait_for_url(re.compile(r"[?&]step=9\b"))
    assert len(sent) == before + 1  # for the link
    total = own_meter(page)
    press_play_twice(page)  # from the beginning
    at_step(page, 1)
    assert 0 < own_meter(page) < total
    visit.close()


@pytest.mark.in_turn
def test_phases_keys_and_slider(server: str, browser: Browser) -> None:
    visit = Visit(browser, "dark")
    page = visit.open(f"{server}/?algorithm=fa1&step=6")
    page.locator(".walk .phases li").nth(2).click()
    expect(page.locator(".walk .phases .now")).to_contain_text("Rescale")
    expect(page.locator(".walk .rescaled.on").first).to_be_visible()
    screenshot(page, "understand-rescale-dark")
    page.locator(".walk").focus()
    page.keyboard.press("ArrowRight")
    at_step(page, 7)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    at_step(page, 5)
    page.get_by_role("slider", name="Step").fill("16")
    at_step(page, 16)
    expect(page.locator(".walk")).to_contain_text("After this step, queries 24–31 equal the plain softmax")
    visit.close()


@pytest.mark.in_turn
def test_it_begins_at_the_first_step_and_another_algorithm_is_another_walk(
    server: str, browser: Browser
) -> None:
    visit = Visit(browser)
    page = visit.open(server)
    at_step(page, 1)
    page.get_by_role("radio", name="FA1: keys outside").click()
    walk = page.locator(".walk")  # for a moment, the former algorithm or both
    expect(walk.filter(has_text="Outer loop: keys; inner loop: queries").first).to_be_visible()
    page.get_by_role("radio", name="FA3: producer and consumers").click()
    expect(walk.get_by_role("img", name="Consumer 1: Waits for its first tile.")).to_be_visible()
    page.get_by_role("slider", name="Step").fill("7")
    expect(walk.locator(".phases")).to_contain_text(
        "O += P V of tile 0 on the tensor cores. Softmax of tile 1"
    )
    screenshot(page, "understand-fa3-light")
    page.get_by_role("radio", name="Flash-Decoding: keys split").click()
    expect(walk.filter(has_text="Keys split").first).to_be_visible()
    page.wait_for_url(re.compile(r"[?&]algorithm=decode\b"))
    visit.settle()
    expect(walk).to_have_count(1)
    visit.close()


@pytest.mark.in_turn
def test_the_backward_from_its_row_sums_to_a_rounded_dq(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/?algorithm=fa2_backward&mask=causal&step=1")
    phases = page.locator(".walk .phases")
    expect(phases).to_contain_text("D = rowsum(dO ∘ O)")
    expect(page.locator(".walk .parts svg")).to_have_count(4)
    page.get_by_role("button", name="Next step").click()
    expect(phases).to_contain_text("dS K is added to dQ of queries 0–7")
    filled = page.locator(".walk .sums .cell:not(.empty)")
    expect(filled).to_have_count(3 * 64)
    page.locator(".walk .phases li").nth(1).click()
    expect(page.locator(".walk .phases .now")).to_contain_text("S = Q Kᵀ is computed again")
    screenshot(page, "understand-backward-light")
    page.get_by_role("slider", name="Step").fill("18")
    at_step(page, 18)
    expect(page.locator(".walk")).to_contain_text(
        "All three gradients differ from the exact gradients by at most"
    )
    page.wait_for_url(re.compile(r"[?&]step=18\b"))
    visit.close()


@pytest.mark.in_turn
def test_ones_own_rows_change_the_heat_map_and_the_derivations_follow_the_step(
    server: str, browser: Browser
) -> None:
    visit = Visit(browser)
    page = visit.open(server)
    heat = page.get_by_role("img", name="Attention weights of 32 rows and 32 keys")
    shown = heat.locator(".cell title")
    expect(shown).to_have_count(32 * 32)
    before = shown.first.text_content()
    page.get_by_text("Your own Q and K").click()
    field = page.get_by_role("textbox", name="First rows of Q")
    for text, said in (("1,apples", "row 1: 'apples' is not a number"), ("0 0 0 0", "1 of 32 rows of Q")):
        field.fill(text)
        field.press("Control+Enter")
        expect(page.get_by_text(said).first).to_be_visible()
    page.wait_for_url(re.compile(r"[?&]q=0(%2C|,)0"))
    expect(shown.first).to_have_text("0.03")  # a query of zeros weighs all 32 keys alike
    assert before != "0.03"
    page.get_by_role("tab", name="P V before the sum").click()
    panel = page.get_by_role("tabpanel").filter(has_text="The division can wait")
    first = panel.inner_text()
    page.get_by_role("slider", name="Step").fill("8")
    expect(panel).to_contain_text("keys 24–31")
    assert panel.inner_text() != first
    screenshot(page, "understand-own-light")
    visit.close()
