"""Visits in a Chromium that nothing looks into while a page comes up.

Playwright has the console and errors of every page reported to it. For that V8 notes, at each exception that a script
catches itself, the source line of every function on the stack, and to find them compiles each again. Plotly's script
throws a few while it starts, out of functions of a megabyte: half a second that no visitor waits.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from dashboard_browser import ARGUMENTS, CHROMIUM, PATIENCE
from websockets.sync.client import ClientConnection, connect

_WATCH = """(() => {
  const roots = () => [document, ...[...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)];
  const isThere = e => e.getBoundingClientRect().width > 0;
  const look = () => {
    if (roots().some(root => [...root.querySelectorAll(%s)].some(isThere))) {
      window.cufaSeconds = performance.now() / 1000;
    } else {
      requestAnimationFrame(look);
    }
  };
  requestAnimationFrame(look);
})()"""
_AT_REST = "document.querySelector('[data-testid=stApp]').dataset.testScriptState == 'notRunning'"


class BareBrowser:
    """Spoken to in Chromium's own protocol, of whose parts only those that navigate and evaluate are switched on."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._calls = 0

    def seconds_until(self, url: str, selector: str) -> float:
        """From the navigation until an element stands on the page, in a window that nothing has been kept in."""
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call(
            "Target.createTarget", url="about:blank", browserContextId=context, width=1360, height=900
        )["targetId"]
        page = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable", page)
        self._call("Page.addScriptToEvaluateOnNewDocument", page, source=_WATCH % json.dumps(selector))
        self._call("Page.navigate", page, url=url)
        seconds = float(self._wait_for(page, "window.cufaSeconds"))
        self._wait_for(page, _AT_REST)
        self._call("Target.disposeBrowserContext", browserContextId=context)
        return seconds

    def _wait_for(self, page: str, expression: str) -> Any:
        """Its value, once it has one that is not false."""
        end = time.monotonic() + PATIENCE / 1000
        while time.monotonic() < end:
            time.sleep(0.2)
            found = self._call("Runtime.evaluate", page, expression=expression)["result"].get("value")
            if found:
                return found
        raise TimeoutError(f"{expression} is not true")

    def _call(self, method: str, page: str | None = None, **parameters: Any) -> Any:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        self._connection.send(json.dumps(message if page is None else {**message, "sessionId": page}))
        while True:
            answer = json.loads(self._connection.recv(PATIENCE / 1000))
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]


@contextlib.contextmanager
def bare_browser() -> Iterator[BareBrowser]:
    """One that has just been started."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM,
            *ARGUMENTS,
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = (line.partition("DevTools listening on ")[2].strip() for line in process.stderr)
            with connect(next(address for address in said if address), max_size=None) as connection:
                yield BareBrowser(connection)
        finally:
            process.terminate()
            process.wait(PATIENCE / 1000)
