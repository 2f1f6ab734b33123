"""What the document of every page says beside what Streamlit writes into it, so that its first figure appears sooner.

Streamlit's client asks for a script when a page has sent the first element that it draws: a second after it was
asked for the page, while the server is busy with that page; Plotly's has 4.7 MB, and takes a browser a third of a
second to run. A header lets the browser fetch them meanwhile, and a script has it run while the server makes the page.

Before it connects, the client asks beside the page and then at the root whether a server is there, and how it is
embedded: four answers, one after the other, that are known when the document is sent.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import streamlit as st


def figure_scripts() -> list[str]:
    """Addresses of what draws figures in a browser."""
    scripts = Path(st.__file__).with_name("static").glob("static/js/PlotlyChart.*.js")
    return [f"/static/js/{script.name}" for script in scripts]


_ELEMENTS = ("Html", "ButtonGroup", "Selectbox", "NumberInput", "Checkbox", "PageLink")
"""What the pages begin with, as Streamlit's scripts are called."""
_IMPORTED = re.compile(r'(?:from|import)"\./([^"]+\.js)"')


@functools.cache
def element_scripts() -> list[str]:
    """Addresses of what draws a page's first elements, with all that it imports and the document does not name."""
    static = Path(st.__file__).with_name("static")
    folder = static / "static" / "js"
    document = (static / "index.html").read_text(encoding="utf-8")
    found: list[str] = []
    begun = [script.name for name in _ELEMENTS for script in folder.glob(f"{name}.*.js")]
    while begun:
        name = begun.pop()
        if name not in found and name not in document:
            found.append(name)
            begun += _IMPORTED.findall((folder / name).read_text(encoding="utf-8"))
    return [f"/static/js/{name}" for name in found]


#: The first page draws its own.
_WITHOUT_FIGURES = ("/", "/doctor")
#: Nothing waits for a figure there before there are runs.
_FIGURES_LATER = (*_WITHOUT_FIGURES, "/run")

_CONNECT = """<script>
window.__streamlit = {
  BACKEND_BASE_URL: location.origin + location.pathname.slice(0, -%d),
  HOST_CONFIG: { allowedOrigins: [location.origin], useExternalAuthToken: false },
};
</script>
"""
"""The server is where the page's path begins, and no other origin may send the page messages."""

_DRAW = """<script type="module">
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (...message) {
  WebSocket.prototype.send = send;
  send.apply(this, message);
  setTimeout(() => %s);
};
</script>
"""
"""Once the client has asked for the page."""


class Document:
    """ASGI middleware: documents name in a ``Link`` header the scripts that they will need, and begin with what saves
    the client asking; the script that draws figures only on pages that have some that it draws."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope.get("headers", ())
        if any(name == b"accept" and b"text/html" in value for name, value in headers):
            plain = [(name, value) for name, value in headers if name != b"accept-encoding"]
            scope = {**scope, "headers": plain}  # so that something can be put into the answer
        await self._app(scope, receive, _Answer(scope, send))


class _Answer:
    """Takes what an application sends, and sends it on: a document as a whole, with our part in it."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._path, self._send = scope["path"], send
        self._asked = scope.get("raw_path") or self._path.encode()  # as the browser has it
        self._start: Any = None
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and _is_document(message["headers"]):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()

    async def _finish(self) -> None:
        before, end, after = self._body.partition(b"</head>")
        headers = [*self._start["headers"], (b"link", _links(self._path))]
        body = self._body
        if end:
            body = before + _scripts(self._path, len(self._asked)) + end + after
            # A browser that asks whether it has changed would be told about Streamlit's part alone.
            own = (b"content-length", b"etag", b"last-modified", b"accept-ranges")
            headers = [(name, value) for name, value in headers if name.lower() not in own]
            headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_document(headers: Any) -> bool:
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(b"text/html") and b"content-encoding" not in found


def _links(path: str) -> bytes:
    figures = [] if path in _WITHOUT_FIGURES else figure_scripts()
    links = [f"<{script}>; rel=modulepreload" for script in figures]
    return ", ".join(
        links + [f"<{x}>; rel=modulepreload; fetchpriority=low" for x in element_scripts()]
    ).encode()


def _scripts(path: str, length: int) -> bytes:
    """For a page of this path, which has so many characters in an address."""
    figures = [] if path in _FIGURES_LATER else figure_scripts()
    draw = ", ".join(f'import(window.__streamlit.BACKEND_BASE_URL + "{script}")' for script in figures)
    return (_CONNECT % length + (_DRAW % draw if draw else "")).encode()
