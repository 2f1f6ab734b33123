"""The dashboard in a real Chromium, served as `cufa dashboard` serves it.

Screenshots of every page in both themes are left in ``$CUFA_SCREENSHOTS``, or in pytest's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

for _package in ("streamlit", "plotly", "playwright"):
    pytest.importorskip(_package, reason=f"the browser test needs {_package}: pip install 'cufa[dev]'")

from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402
from test_dashboard_pages import PAGES  # noqa: E402

from cufa.dashboard.worker import client  # noqa: E402
from cufa.dashboard.worker.run import Status  # noqa: E402
from cufa.dashboard.worker.store import Store  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
ARGUMENTS = [
    "--headless",
    "--no-sandbox",  # root in a container has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Streamlit's client, opened below the root, first asks for these beside the page.
PROBES = re.compile(r"/_stcore/(health|host-config)$")
#: Compiling happens on these pages; they may take longer to come to rest on two busy cores.
PATIENCE = 90_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Where the served dashboard keeps its runs; its worker ends with the tests."""
    store = Store(tmp_path_factory.mktemp("runs"))
    yield store
    pid = client.worker_pid(store, "cpu")
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, runs: Store) -> Iterator[str]:
    """`cufa dashboard`, started in some other directory, with caches of its own."""
    folder = tmp_path_factory.mktemp("served")
    # Port 0: whichever is free when the server binds it. A port that is looked up before may be gone by then.
    command = [sys.executable, "-m", "cufa", "dashboard", "--no-browser", "--port", "0"]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CUFA_CACHE_DIR": str(folder / "cache"), "CUFA_RUNS_DIR": str(runs.root), "PYTHONPATH": path}
    environment = {**os.environ, **own}
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield _address(process, folder / "log")
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """What the server says, once it answers there."""
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found is not None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{found[0]}/_stcore/health", timeout=2),
            ):
                return found[0]
        time.sleep(0.1)
    raise AssertionError(f"the dashboard did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


class Visit:
    """A page in a window of its own; :meth:`close` fails on anything that went wrong in it."""

    def __init__(self, browser: Browser, theme: str = "light", width: int = 1360) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page: Page = self.context.new_page()
        self.trouble: list[str] = []
        self.page.on("console", lambda m: m.type == "error" and self._note(m.text, m.location["url"]))
        self.page.on("pageerror", lambda error: self._note(str(error), ""))
        self.page.on("request", lambda r: self._is_local(r.url) or self._note("leaves this machine", r.url))

    def _note(self, text: str, url: str) -> None:
        if not PROBES.search(url):
            self.trouble.append(f"{text} {url}")

    @staticmethod
    def _is_local(url: str) -> bool:
        return re.match(r"(https?|ws)://127\.0\.0\.1[:/]|data:|blob:", url) is not None

    def open(self, url: str) -> Page:
        self.page.goto(url)
        return self.settle()

    def settle(self) -> Page:
        """Until the script has run to its end."""
        expect(self.page.locator("h1")).to_be_visible(timeout=PATIENCE)
        # A rerun that a click has asked for begins a moment later, and a figure is drawn a moment after its
        # data: at rest means at rest twice.
        at_rest = self.page.locator("[data-testid=stApp][data-test-script-state=notRunning]")
        for _ in range(2):
            expect(at_rest).to_have_count(1, timeout=PATIENCE)
            expect(self.page.locator("[data-stale=true]")).to_have_count(0, timeout=PATIENCE)
            self.page.wait_for_timeout(300)
        assert self.page.get_by_test_id("stException").count() == 0, self.page.inner_text("body")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.trouble == []


def address_of(name: str) -> str:
    """Streamlit serves its first page at the root, and only there."""
    return "" if name == PAGES[0] else name


MASKED = address_of("masked_work")


def screenshot(page: Page, name: str, folder: Path) -> None:
    """The whole page: Streamlit scrolls inside, so the window is made as tall as its content."""
    folder = Path(os.environ.get("CUFA_SCREENSHOTS", folder))
    folder.mkdir(parents=True, exist_ok=True)
    size = page.viewport_size
    assert size is not None
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(int(height) + 40, 6000)})
    page.wait_for_timeout(400)
    page.screenshot(path=folder / f"{name}.png")
    page.set_viewport_size(size)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_by_the_sidebar(server: str, browser: Browser, theme: str, tmp_path: Path) -> None:
    visit = Visit(browser, theme)
    page = visit.open(server)
    links = page.get_by_test_id("stSidebarNavLink")
    assert links.count() == len(PAGES)
    for number, name in enumerate(PAGES):
        links.nth(number).click()
        page.wait_for_url(f"{server}/{address_of(name)}")
        visit.settle()
        expect(page.locator(".cufa-verdict").first).to_be_visible(timeout=PATIENCE)
        page.wait_for_timeout(500)
        screenshot(page, f"{name}-{theme}", tmp_path)
    visit.close()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_by_its_link(server: str, browser: Browser, name: str) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{address_of(name)}?nonsense=1")
    notice = page.get_by_test_id("stAlert").filter(has_text="'nonsense'")
    expect(notice).to_be_visible(timeout=PATIENCE)
    visit.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_window(server: str, browser: Browser, name: str, tmp_path: Path) -> None:
    visit = Visit(browser, width=390)
    page = visit.open(f"{server}/{address_of(name)}")
    page.wait_for_timeout(500)
    main = "document.querySelector('[data-testid=stMain]')"
    assert page.evaluate(f"{main}.scrollWidth - {main}.clientWidth") <= 1
    screenshot(page, f"{name}-narrow", tmp_path)
    visit.close()


def test_figures_have_names_for_screen_readers(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}")
    expect(page.get_by_role("figure", name="Grid of 32 query blocks")).to_be_visible(timeout=PATIENCE)
    for figure in page.get_by_test_id("stPlotlyChart").all():
        assert len(figure.get_attribute("aria-label") or "") > 40
    visit.close()


def test_a_click_selects_a_tile_and_the_link_carries_it(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=1024&sk=1024")  # 8 × 16 tiles of 128 × 64
    page.set_viewport_size({"width": 1360, "height": 1400})  # all of the grid
    grid = page.locator(".js-plotly-plot .nsewdrag").first
    expect(grid).to_be_visible(timeout=PATIENCE)
    page.wait_for_timeout(800)
    box = grid.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 3.5 / 16, box["y"] + box["height"] * 5.5 / 8)
    expect(page.get_by_role("spinbutton", name="Query block")).to_have_value("5", timeout=PATIENCE)
    expect(page.get_by_role("spinbutton", name="Key block")).to_have_value("3")
    visit.settle()
    assert "Tile (5, 3)" in page.inner_text("body")
    page.wait_for_url(re.compile(r"[?&]q=5\b.*[?&]k=3\b"))
    page.reload()
    visit.settle()
    expect(page.get_by_role("spinbutton", name="Query block")).to_have_value("5")
    visit.close()


def test_controls_answer_to_the_keyboard(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=1024&sk=1024")
    field = page.get_by_role("spinbutton", name="Key block")
    expect(field).to_have_value("1", timeout=PATIENCE)
    field.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(field).to_have_value("2")
    page.wait_for_url(re.compile(r"[?&]k=2\b"))
    visit.settle()
    assert ", 2) is" in page.inner_text("body")
    visit.close()


#: 256 × 256 tiles and 20,480 blocks.
LARGE = "sq=16384&sk=16384&heads=20&tiles=custom&bq=64&bkv=64"


def test_a_mask_is_chosen_and_the_link_carries_it(server: str, browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=2048&sk=2048")
    page.get_by_role("radio", name="window", exact=True).click()
    page.wait_for_url(re.compile(r"[?&]mask=window\b"), timeout=PATIENCE)
    visit.settle()
    expect(page.get_by_text("Mask: window (1023, 0)").first).to_be_visible(timeout=PATIENCE)
    left = page.get_by_role("spinbutton", name="Keys before")
    left.fill("300")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"[?&]left=300\b"), timeout=PATIENCE)
    visit.settle()
    right = page.get_by_role("spinbutton", name="Keys after")
    right.fill("")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"[?&]right=none\b"), timeout=PATIENCE)
    visit.settle()
    expect(page.get_by_text("Mask: window (300, None)").first).to_be_visible(timeout=PATIENCE)
    figure = page.get_by_role("figure", name=re.compile("Grid of .* under the mask window \\(300, None\\)"))
    expect(figure).to_be_visible(timeout=PATIENCE)
    page.get_by_role("spinbutton", name="Soft cap").fill("30")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"[?&]softcap=30"), timeout=PATIENCE)
    visit.settle()
    page.reload()
    visit.settle()
    expect(page.get_by_text("Mask: window (300, None), softcap 30").first).to_be_visible(timeout=PATIENCE)
    screenshot(page, "masked_work-window-light", tmp_path)
    visit.close()


def test_a_bad_mask_in_a_link_is_told(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?mask=window&left=-3")
    notice = page.get_by_test_id("stAlert").filter(has_text="left = '-3'")
    expect(notice).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("Mask: window (1023, 0)").first).to_be_visible(timeout=PATIENCE)
    visit.close()


def test_the_former_address_of_masked_work_goes_on_to_it(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/causal_work?sq=512&mask=full")
    page.wait_for_url(f"{server}/{MASKED}?*", timeout=PATIENCE)
    visit.settle()
    expect(page.get_by_role("heading", name="Masked work")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("spinbutton", name="Queries", exact=True)).to_have_value("512")
    assert "Nothing is masked" in page.inner_text("body")
    visit.close()


def test_a_large_view_is_drawn_under_every_mask(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?{LARGE}")
    for mask, answer in (("full", "Nothing is masked"), ("window", "Skipping"), ("causal", "Skipping")):
        page.get_by_role("radio", name=mask, exact=True).click()
        expect(page.locator(".cufa-verdict", has_text=answer).first).to_be_visible(timeout=PATIENCE)
        visit.settle()
    visit.close()


# --- Runs: started, left, cancelled, killed, taken away -----------------------------------------------------

RUN = address_of("run")
SMALL = "kernels=fa1,fa2&sq=256&sk=256&seconds=0.2"
#: Minutes on any CPU: it is always stopped.
ENDLESS = "kernels=fa2&batch=4&heads=16&sq=8192&sk=8192&d=128&kv=16&seconds=10"


def start(page: Page) -> None:
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile(r"[?&]run=\d{8}T"), timeout=PATIENCE)


def test_a_cpu_run_from_start_to_result(server: str, browser: Browser, runs: Store, tmp_path: Path) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{RUN}?{SMALL}")
    start(page)
    tag = page.locator(".cufa-tag", has_text="measured on CPU")
    expect(tag).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("figure", name="Times of every call")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0, timeout=PATIENCE)
    assert "float64" in page.get_by_test_id("stMetric").last.inner_text()
    assert runs.all()[0].status is Status.DONE
    page.reload()
    visit.settle()
    expect(tag).to_be_visible(timeout=PATIENCE)
    screenshot(page, "run-result-light", tmp_path)
    visit.close()


def test_a_run_survives_a_reload_is_seen_by_two_browsers_and_can_be_cancelled(
    server: str, browser: Browser, runs: Store, tmp_path: Path
) -> None:
    visit, other = Visit(browser), Visit(browser, "dark")
    page = visit.open(f"{server}/{RUN}?{ENDLESS}")
    start(page)
    cancel = page.get_by_role("button", name="Cancel")
    progress = page.get_by_test_id("stProgress").filter(has_text="timing fa2")
    expect(progress).to_be_visible(timeout=PATIENCE)
    page.reload()
    visit.settle()
    expect(progress).to_be_visible(timeout=PATIENCE)
    second = other.open(f"{server}/{RUN}?{SMALL}")
    expect(second.get_by_role("button", name="Cancel")).to_have_count(1, timeout=PATIENCE)
    start(second)  # waits behind the first
    expect(second.get_by_test_id("stProgress").filter(has_text="waiting: 1 before it")).to_be_visible(
        timeout=PATIENCE
    )
    screenshot(second, "run-queue-dark", tmp_path)
    cancel.first.click()
    expect(page.locator(".cufa-verdict", has_text="Cancelled")).to_be_visible(timeout=PATIENCE)
    expect(second.locator(".cufa-tag", has_text="measured on CPU")).to_be_visible(timeout=PATIENCE)
    assert [run.status for run in runs.all()[:2]] == [Status.DONE, Status.CANCELLED]
    visit.close()
    other.close()


def test_samples_are_drawn_while_they_are_taken(server: str, browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{RUN}?kernels=naive,fa2&sq=2048&sk=2048&seconds=10")
    start(page)
    expect(page.locator(".cufa-verdict", has_text="rounds: naive")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("figure", name="Times of every call")).to_be_visible(timeout=PATIENCE)
    screenshot(page, "run-live-light", tmp_path)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".cufa-verdict", has_text="Cancelled")).to_be_visible(timeout=PATIENCE)
    visit.close()


def test_a_worker_that_is_killed_is_shown_and_the_next_run_works(
    server: str, browser: Browser, runs: Store, tmp_path: Path
) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{RUN}?{ENDLESS}")
    start(page)
    expect(page.get_by_test_id("stProgress").filter(has_text="timing fa2")).to_be_visible(timeout=PATIENCE)
    pid = client.worker_pid(runs, "cpu")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    verdict = page.locator(".cufa-verdict.alarm")
    expect(verdict).to_contain_text("worker process died", timeout=PATIENCE)
    visit.settle()
    screenshot(page, "run-killed-light", tmp_path)
    page = visit.open(f"{server}/{RUN}?{SMALL}")
    start(page)
    expect(page.locator(".cufa-tag", has_text="measured on CPU")).to_be_visible(timeout=PATIENCE)
    visit.close()


def test_a_report_is_downloaded_and_opens_without_the_network(
    server: str, browser: Browser, runs: Store, tmp_path: Path
) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/history")
    with page.expect_download(timeout=PATIENCE) as download:
        page.get_by_role("button", name="HTML report").click()
    report = tmp_path / download.value.suggested_filename
    download.value.save_as(report)
    for name, start_of in (("CSV", "id,origin,machine"), ("JSON Lines, every sample", '{"id": ')):
        with page.expect_download(timeout=PATIENCE) as download:
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
    expect(opened.locator(".js-plotly-plot .main-svg").first).to_be_visible(timeout=PATIENCE)
    assert opened.locator("table").count() >= 1
    opened.screenshot(path=Path(os.environ.get("CUFA_SCREENSHOTS", tmp_path)) / "report.png", full_page=True)
    reader.close()
    assert trouble == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_with_runs_in_both_themes(
    server: str, browser: Browser, runs: Store, theme: str, tmp_path: Path
) -> None:
    visit = Visit(browser, theme)
    for name in ("compare", "history"):
        page = visit.open(f"{server}/{name}")
        expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible(timeout=PATIENCE)
        screenshot(page, f"{name}-runs-{theme}", tmp_path)
    visit.close()


def test_two_rows_of_the_table_are_compared(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/history?from=recorded")
    table = page.get_by_test_id("stDataFrame")
    expect(table).to_be_visible(timeout=PATIENCE)
    page.wait_for_timeout(500)
    box = table.bounding_box()
    assert box is not None
    for row in (2, 4):  # drawn on a canvas: a header, then rows of 35 pixels
        page.mouse.click(box["x"] + 18, box["y"] + 36 + 35 * (row + 0.5))
        visit.settle()
    page.wait_for_url(re.compile(r"[?&]a=[^&]*\.2\b.*[?&]b=[^&]*\.4\b"))
    visit.close()


def test_runs_are_deleted(server: str, browser: Browser, runs: Store) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{RUN}?{SMALL}")
    start(page)
    expect(page.locator(".cufa-tag", has_text="measured on CPU")).to_be_visible(timeout=PATIENCE)
    page = visit.open(f"{server}/history?from=run")
    page.get_by_text("kept on this machine").click()
    page.get_by_text("All of them").click()
    page.get_by_role("button", name=re.compile("Delete [1-9].* for good")).click()
    expect(page.locator(".cufa-verdict", has_text="Nothing fits")).to_be_visible(timeout=PATIENCE)
    visit.settle()
    assert runs.all() == []
    visit.close()


def test_other_hosts_are_refused(server: str) -> None:
    """A page elsewhere that points its own name at this address must not reach the dashboard."""
    port = int(server.rsplit(":", 1)[1])

    def handshake(host: str, origin: str = "") -> int:
        request = (
            f"GET /_stcore/stream HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Origin: {origin or f'http://{host}'}\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(request.encode())
            return int(connection.recv(100).split()[1])

    assert handshake(f"127.0.0.1:{port}") == 101
    assert handshake("rebound.example.com") == 403
    assert handshake(f"127.0.0.1:{port}", f"http://localhost:{port}") == 403
    assert handshake(f"127.0.0.1:{port}", "http://localhost:1") == 403
    assert handshake(f"127.0.0.1:{port}", "http://203.0.113.7") == 403


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_only_this_machine_is_served(server: str) -> None:
    port = int(server.rsplit(":", 1)[1])
    listening = [
        fields[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port
    ]
    assert listening == [f"0100007F:{port:04X}"]
