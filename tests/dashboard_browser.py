"""What the tests in a real Chromium share: the dashboard as `cufa dashboard` serves it, a browser, a visit.

Screenshots are left in ``$CUFA_SCREENSHOTS``, or in pytest's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

for _package in ("streamlit", "plotly", "playwright"):
    pytest.importorskip(_package, reason=f"the browser test needs {_package}: pip install 'cufa[dev]'")

from dashboard_page_support import PAGES  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

from cufa.dashboard.worker import client  # noqa: E402
from cufa.dashboard.worker.store import Store  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
    with serve(tmp_path_factory.mktemp("served"), runs.root) as address:
        yield address


@contextlib.contextmanager
def serve(folder: Path, runs: Path) -> Iterator[str]:
    """`cufa dashboard`, started in some other directory, with caches of its own; its address."""
    # Port 0: whichever is free when the server binds it. A port that is looked up before may be gone by then.
    command = [sys.executable, "-m", "cufa", "dashboard", "--no-browser", "--port", "0"]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CUFA_CACHE_DIR": str(folder / "cache"), "CUFA_RUNS_DIR": str(runs), "PYTHONPATH": path}
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
