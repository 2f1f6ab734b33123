"""Waiting times of the dashboard in a real Chromium: `make bench-pages`.

Every page is opened in fresh browsers until its first figure is drawn, and once more to count the bytes on the wire.
Then controls of one page are changed until the answer is on the screen. Seconds are a matter of the machine and of what
else it does: they are recorded with both, under ``cufa/records/pages``, and no test asserts them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import socket
import socketserver
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bare_browser import bare_browser
from dashboard_browser import ARGUMENTS, CHROMIUM, MASKED, Visit, address_of, serve
from dashboard_page_support import PAGES
from playwright.sync_api import Browser, Page, sync_playwright

from cufa.calls.tuning import write_json
from cufa.measure import cards, machine
from cufa.run.cpu.blas import usable_cores

GOALS = {"first figure": 2.5, "answer": 0.3, "first visit, MB": 4.0}
"""Goals in seconds and megabytes, on two idle cores."""
_FIGURE = ".js-plotly-plot .main-svg, .walk .inside svg"
_CHANGES: dict[str, tuple[str, str]] = {
    "another mask": ("full", "Nothing is masked"),
    "the mask again": ("causal", "Skipping the other"),
    "another algorithm": ("FA2, no skip", "nothing is skipped"),
    "an algorithm of larger tiles": ("FA3", "Skipping the other"),
}
"""Clicked option of Masked work, and a part of the verdict that answers."""


class Relay(socketserver.ThreadingTCPServer):
    """A proxy that counts the bytes of the server; no other place sees the bytes of a compressed socket."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.to = ("127.0.0.1", int(server.rsplit(":", 1)[1]))
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.counts: list[int] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of closed browsers."""


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        with socket.create_connection(self.server.to) as server:
            ends = {self.request: server, server: self.request}
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    part = end.recv(1 << 16)
                    if not part:
                        return
                    if end is server:
                        self.server.counts.append(len(part))
                    ends[end].sendall(part)


def megabytes(browser: Browser, server: str, page: str) -> float:
    """Megabytes sent to a fresh browser until the page is at rest."""
    with Relay(server) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        visit = Visit(browser)
        visit.open(f"{relay.address}/{page}")
        visit.context.close()
        relay.shutdown()
        return round(sum(relay.counts) / 1e6, 2)


def first_visits(server: str, pages: Sequence[str], visits: int) -> dict[str, list[float]]:
    """Seconds until the first figure in a fresh browser."""
    found = {}
    with bare_browser() as browser:
        for name in pages:
            place, first = f"{server}/{address_of(name)}", _FIGURE if _draws(name) else ".cufa-verdict"
            found[name] = [round(browser.seconds_until(place, first), 3) for _ in range(visits)]
            print(f"{name:12} first figure {statistics.median(found[name]):.2f} s, of {found[name]}")
    return found


def answers(browser: Browser, server: str, repeats: int) -> dict[str, list[float]]:
    """Seconds from each click to its answer, the first time and later."""
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}")
    found: dict[str, list[float]] = {name: [] for name in _CHANGES}
    for _ in range(repeats):
        for name, (option, sentence) in _CHANGES.items():
            found[name].append(round(_answer(page, option, sentence), 3))
            visit.settle()
    visit.context.close()
    return found


#: Clicks, and tells how long after it the sentence was drawn: from within the page, because Playwright looks again
#: after 20, 50, 100, 100 and then every 500 milliseconds.
_CLICK = """([option, sentence]) => new Promise(done => {
  const begun = performance.now();
  const drawn = () => done((performance.now() - begun) / 1000);
  const look = () => {
    if ([...document.querySelectorAll('.cufa-verdict')].some(e => e.innerText.includes(sentence))) {
      requestAnimationFrame(drawn);
    } else {
      requestAnimationFrame(look);
    }
  };
  [...document.querySelectorAll('[role=radio]')].find(e => e.innerText.trim() == option).click();
  requestAnimationFrame(look);
})"""


def _answer(page: Page, option: str, sentence: str) -> float:
    return float(page.evaluate(_CLICK, [option, sentence]))


def measure(pages: Sequence[str], visits: int, repeats: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), Path(folder) / "runs") as server:
        time.sleep(8)  # until the server has prepared and compiled everything
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            moved = {name: megabytes(browser, server, address_of(name)) for name in pages}
            print("megabytes of a first visit:", moved)
            found = answers(browser, server, repeats)
            browser.close()
        seconds = first_visits(server, pages, visits)
    for name, taken in found.items():
        print(f"{name:30} first {taken[0]:.2f} s, then {statistics.median(taken[1:] or taken):.2f} s")
    return {
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.environment(None)["device"],
        "cores": usable_cores(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "goals": GOALS,
        "pages": {name: {"seconds": seconds[name], "megabytes": moved[name]} for name in pages},
        "answers": found,
    }


def _draws(page: str) -> bool:
    """Whether the page has a figure before the first run or answer."""
    return page not in ("run", "doctor", "exercises")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--visits", type=int, default=3, help="fresh browsers per page")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of changed controls")
    parser.add_argument(
        "--pages", nargs="*", choices=PAGES, default=PAGES, help="only these, unrecorded but in --out"
    )
    parser.add_argument("--out", type=Path, help="default: the record, if it is of all pages")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 3
    found = measure(options.pages, options.visits, options.repeats)
    out = options.out
    if out is None and set(options.pages) == set(PAGES):
        out = cards.RECORDS_DIR / "pages" / "chromium.json"
    if out is not None:
        write_json(out, found)
    print(json.dumps({k: found[k] for k in ("machine", "cores", "load_before", "load_after")}), out or "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
