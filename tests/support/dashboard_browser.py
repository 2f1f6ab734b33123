"""What the tests in a real Chromium share: the dashboard as `cufa dashboard` serves it, and a visit. Where a package is
missing, the tests of the file that imports this are skipped.

Screenshots are left in ``$CUFA_SCREENSHOTS``, if that is set.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin
from weakref import WeakKeyDictionary

import pytest

for _package in ("streamlit", "plotly", "playwright"):
    pytest.importorskip(_package, reason=f"the browser test needs {_package}: pip install 'cufa[dev]'")

from dashboard_page_support import PAGES  # noqa: E402
from dashboard_support import own_cache  # noqa: E402
from playwright.sync_api import (  # noqa: E402
    Browser,
    FloatRect,
    Locator,
    Page,
    TimeoutError,
    ViewportSize,
    expect,
)

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
    "--js-flags=--no-maglev --no-opt",  # no page is open for so long that optimised code is worth its compilation
]


#: Milliseconds. Compiling happens on these pages, and the cores may be busy with something else.
PATIENCE = 300_000
expect.set_options(timeout=PATIENCE)


@contextlib.contextmanager
def serve(folder: Path, runs: Path) -> Iterator[str]:
    """`cufa dashboard`, started in some other directory, with caches of its own; its address."""
    # Port 0: whichever is free when the server binds it. A port that is looked up before may be gone by then.
    command = [sys.executable, "-m", "cufa", "dashboard", "--no-browser", "--port", "0"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CUFA_CACHE_DIR": str(own_cache(folder / "cache")), "CUFA_RUNS_DIR": str(runs), "PYTHONPATH": path}
    environment = {**os.environ, **own}
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield _address(process, folder / "log")
    finally:
        os.killpg(process.pid, 15)
        process.wait(PATIENCE / 1000)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """What the server says, once it answers there."""
    for _ in range(PATIENCE // 100):
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found is not None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{found[0]}/_stcore/health", timeout=10),
            ):
                return found[0]
        time.sleep(0.1)
    raise AssertionError(f"the dashboard did not start: {log.read_text()}")


#: Windows of visits that are over. A process that has compiled Streamlit's scripts once opens the next page at half the
#: cost.
_WINDOWS: WeakKeyDictionary[Browser, list[Page]] = WeakKeyDictionary()


class Visit:
    """A page in a window that nothing has been kept in; :meth:`close` fails on anything that went wrong in it."""

    def __init__(self, browser: Browser, theme: str = "light", width: int = 1360) -> None:
        self.size: ViewportSize = {"width": width, "height": 900}
        self.free = _WINDOWS.setdefault(browser, [])
        self.page: Page = self.free.pop() if self.free else self._window(browser)
        self.page.set_viewport_size(self.size)
        self.page.emulate_media(color_scheme=theme)
        self.context = self.page.context
        self.trouble: list[str] = []
        self.listeners: dict[str, Callable[..., object]] = {
            "console": lambda m: m.type == "error" and self._note(m.text, m.location["url"]),
            "pageerror": lambda error: self._note(str(error), ""),
            "request": lambda r: self._is_local(r.url) or self._note("leaves this machine", r.url),
        }
        for event, listener in self.listeners.items():
            self.page.on(event, listener)

    @staticmethod
    def _window(browser: Browser) -> Page:
        # Nothing moves while a test waits: every frame would be drawn without a GPU.
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        return context.new_page()

    def _note(self, text: str, url: str) -> None:
        self.trouble.append(f"{text} {url}")

    @staticmethod
    def _is_local(url: str) -> bool:
        return re.match(r"(https?|ws)://127\.0\.0\.1[:/]|data:|blob:", url) is not None

    def open(self, url: str) -> Page:
        self.page.goto(url)
        return self.settle()

    def open_live(self, url: str) -> Page:
        """A page that draws itself anew while a run goes on: on a busy machine it is never at rest."""
        self.page.goto(url)
        expect(self.page.locator("h1")).to_be_visible()
        return self.page

    def settle(self) -> Page:
        """Until the script has run to its end."""
        expect(self.page.locator("h1")).to_be_visible()
        # A rerun that a click has asked for begins a moment later, and a figure is drawn a moment after its
        # data: at rest means at rest twice.
        at_rest = self.page.locator("[data-testid=stApp][data-test-script-state=notRunning]")
        for _ in range(2):
            expect(at_rest).to_have_count(1)
            expect(self.page.locator("[data-stale=true]")).to_have_count(0)
            self.page.wait_for_timeout(300)
        assert self.page.get_by_test_id("stException").count() == 0, self.page.inner_text("body")
        return self.page

    def close(self) -> None:
        """Leave the window to the next visit, with nothing in it that this one has kept."""
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.goto(
            urljoin(self.page.url, "/_stcore/health")
        )  # of the same place, which is what is kept by
        self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self.context.clear_cookies()
        self.free.append(self.page)
        assert self.trouble == []


def address_of(name: str) -> str:
    """Streamlit serves its first page at the root, and only there."""
    return "" if name == PAGES[0] else name


MASKED = address_of("masked_work")


def place_of(element: Locator) -> FloatRect:
    """Where something is drawn, once it stays there."""
    expect(element).to_be_visible()
    before = None
    while (box := element.bounding_box()) is None or box != before:
        before = box
        element.page.wait_for_timeout(400)
    return box


def screenshot(page: Page, name: str) -> None:
    """The whole page, where they are asked for: Streamlit scrolls inside, so the window is made as tall as its
    content."""
    folder = os.environ.get("CUFA_SCREENSHOTS")
    if not folder:
        return
    size = page.viewport_size
    assert size is not None
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(int(height) + 40, 6000)})
    page.wait_for_timeout(400)
    page.screenshot(path=Path(folder, f"{name}.png"))
    page.set_viewport_size(size)


#: What scrolls sideways: the page itself, a group of choices, and choices that the window cuts.
_CUT = """() => {
  const scrolls = e => e.scrollWidth - e.clientWidth > 1;
  const outside = e => e.getBoundingClientRect().left < 0 || e.getBoundingClientRect().right > innerWidth + 1;
  const choices = [...document.querySelectorAll('[role=radio]')];
  const groups = choices.map(e => e.closest('[role=radiogroup]'));
  const main = document.querySelector('[data-testid=stMain]');
  return [main, ...groups].filter(scrolls).concat(choices.filter(outside)).map(e => e.innerText.slice(0, 80));
}"""


def assert_nothing_is_cut(page: Page, width: int) -> None:
    """In a window so wide, once the layout has followed."""
    page.set_viewport_size({"width": width, "height": 900})
    with contextlib.suppress(TimeoutError):
        page.wait_for_function(f"({_CUT})().length == 0 && innerWidth == {width}")
    assert page.evaluate(_CUT) == [], f"in a window of {width} pixels"
