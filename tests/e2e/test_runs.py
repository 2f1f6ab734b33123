"""Runs in a real Chromium: start, reload, cancel, download, delete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dashboard_browser import Visit, address_of, place_of, screenshot
from dashboard_run_support import over, small, wait_for
from playwright.sync_api import Browser, Page, expect
from sampling import of_today

from cufa.dashboard.worker import client
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store

RUN = address_of("run")


SMALL = "kernels=fa1,fa2&sq=256&sk=256&seconds=0.2"


#: Sixteen timings of at least ten seconds each, however fast the CPU: it is always stopped. Small calls, so that the
#: first is soon seen and the page has a core to draw with.
ENDLESS = "kernels=naive,fa1,fa2,fa2_noskip&heads=1&kv=1&sq=256&sk=256&also=512,1024,2048&regime=sustained&seconds=10"


def start(page: Page) -> str:
    """Start a run; returns its id, once the link has it instead of an older one."""
    former = re.search(r"[?&]run=[^&]*|$", page.url)
    assert former is not None
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(
        lambda url: bool(re.search(r"[?&]run=\d{8}T", url)) and not (former[0] and former[0] in url)
    )
    return re.search(r"[?&]run=([^&]*)", page.url)[1]


@pytest.mark.in_turn
def test_a_cpu_run_from_start_to_result(server: str, browser: Browser, runs: Store) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{RUN}?{SMALL}")
    start(page)
    tag = page.locator(".cufa-tag", has_text="measured on CPU").first
    expect(tag).to_be_visible()
    visit.settle()  # until then, the figure of the finished run may stand beside that of the run under way
    expect(page.get_by_role("figure", name="Times of every call").first).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(page.get_by_test_id("stMetric").last).to_contain_text("float64")
    assert runs.all()[0].status is Status.DONE
    page.reload()
    visit.settle()
    expect(tag).to_be_visible()
    screenshot(page, "run-result-light")
    visit.close()


@pytest.mark.in_turn
def test_a_run_is_seen_as_it_goes_on_survives_a_reload_and_can_be_cancelled(
    server: str, browser: Browser, runs: Store
) -> None:
    """In two browsers; the second one waits with its own run."""
    visit, other = Visit(browser), Visit(browser, "dark")
    former = runs.ids()
    page = visit.open(f"{server}/{RUN}?{ENDLESS}")
    first = start(page)
    # A part that is redrawn may exist twice for a moment.
    progress = page.get_by_test_id("stProgress").filter(has_text="timing naive").first
    expect(progress).to_be_visible()
    expect(page.locator(".cufa-verdict", has_text="batches: naive").first).to_be_visible()
    # A former run's figure may still be there, and a redrawn figure follows the old one.
    expect(page.get_by_role("figure", name=re.compile("Times of every call.* naive: ")).last).to_be_visible()
    screenshot(page, "run-live-light")
    page.reload()
    expect(progress).to_be_visible()
    second = other.open_live(f"{server}/{RUN}?{SMALL}")
    expect(second.get_by_role("button", name="Cancel").first).to_be_visible()
    last = start(second)  # waits behind the first
    expect(second.get_by_test_id("stProgress").filter(has_text="waiting: 1 earlier").first).to_be_visible()
    screenshot(second, "run-queue-dark")
    page.get_by_role("button", name="Cancel").first.click()
    expect(page.locator(".cufa-verdict", has_text="Cancelled").first).to_be_visible()
    expect(second.locator(".cufa-tag", has_text="measured on CPU").first).to_be_visible()
    became = {run.id: run.status for run in runs.all() if run.id not in former}
    assert became == {first: Status.CANCELLED, last: Status.DONE}
    visit.close()
    other.close()


@pytest.fixture
def one_run(runs: Store) -> None:
    """At least one finished run."""
    if not any(run.status is Status.DONE for run in runs.all()):
        assert wait_for(runs, client.submit(runs, small()), over).status is Status.DONE


@pytest.mark.usefixtures("one_run")
@pytest.mark.in_turn
@pytest.mark.parametrize("origin", of_today(["run", "recorded"], "measurements of a report", dated=0))
def test_a_report_is_downloaded_and_opens_without_the_network(
    server: str, browser: Browser, tmp_path: Path, origin: str
) -> None:
    """For own runs; nightly also for all recorded measurements."""
    visit = Visit(browser)
    page = visit.open(f"{server}/history?from={origin}")
    with page.expect_download() as download:
        page.get_by_role("button", name="HTML report").click()
    report = tmp_path / download.value.suggested_filename
    download.value.save_as(report)
    for name, start_of in (("CSV", "id,origin,machine"), ("JSON Lines, all samples", '{"id": ')):
        with page.expect_download() as download:
            page.get_by_test_id("stDownloadButton").get_by_role("button", name=name).click()
        assert Path(download.value.path()).read_text().startswith(start_of)
    visit.close()
    reader = browser.new_context(offline=True)
    trouble: list[str] = []
    opened = reader.new_page()
    opened.on("console", lambda m: m.type == "error" and trouble.append(m.text))
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.on("request", lambda r: r.url.startswith("http") and trouble.append(r.url))
    opened.goto(report.as_uri())
    expect(opened.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(opened.locator("table").first).to_be_attached()
    reader.close()
    assert trouble == []


@pytest.mark.in_turn
def test_two_rows_of_the_table_are_compared(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/history?from=recorded")
    table = page.get_by_test_id("stDataFrame")
    expect(table).to_be_visible()
    box = place_of(table)
    for row in (2, 4):  # drawn on a canvas: a header, then rows of 35 pixels
        page.mouse.click(box["x"] + 18, box["y"] + 36 + 35 * (row + 0.5))
        visit.settle()
    page.wait_for_url(re.compile(r"[?&]a=[^&]*\.2\b.*[?&]b=[^&]*\.4\b"))
    visit.close()
