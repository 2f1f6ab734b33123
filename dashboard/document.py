"""Additions to Streamlit's HTML document that make the first figure appear sooner.

Streamlit's client requests the script of an element when the first such element arrives: about a second after the page
request, while the server is busy. Plotly's script has 4.7 MB and runs for a third of a second. A ``Link`` header lets
the browser fetch the scripts at once, and an inline script runs Plotly's script while the server computes the page.

Before it connects, the client sends four requests in sequence to find the server and its embedding. The document
contains the answers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import streamlit as st


def figure_scripts() -> list[str]:
    """Addresses of Plotly's script."""
    scripts = Path(st.__file__).with_name("static").glob("static/js/PlotlyChart.*.js")
    return [f"/static/js/{script.name}" for script in scripts]


_ELEMENTS = ("Html", "ButtonGroup", "Selectbox", "NumberInput", "Checkbox", "PageLink")
"""Streamlit's scripts of the first elements of the pages."""
_IMPORTED = re.compile(r'(?:from|import)"\./([^"]+\.js)"')


@functools.cache
def element_scripts() -> list[str]:
    """Addresses of the scripts of a page's first elements and their imports, except scripts named in the document."""
    static = Path(st.__file__).with_name("static")
    folder = static / "static" / "js"
    document = (static / "index.html").read_text(encoding="utf-8")
    scripts: list[str] = []
    begun = [script.name for name in _ELEMENTS for script in folder.glob(f"{name}.*.js")]
    while begun:
        name = begun.pop()
        if name not in scripts and name not in document:
            scripts.append(name)
            begun += _IMPORTED.findall((folder / name).read_text(encoding="utf-8"))
    return [f"/static/js/{name}" for name in scripts]


#: Pages without Plotly figures.
_WITHOUT_FIGURES = ("/", "/doctor")
#: Pages without a figure before the first run.
_FIGURES_LATER = (*_WITHOUT_FIGURES, "/run")

_CONNECT = """<script>
window.__streamlit = {
  BACKEND_BASE_URL: location.origin + location.pathname.slice(0, -%d),
  HOST_CONFIG: { allowedOrigins: [location.origin], useExternalAuthToken: false },
};
</script>
"""
"""The server is at the start of the page's path; no other origin may send messages to the page."""

_DRAW = """<script type="module">
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (...message) {
  WebSocket.prototype.send = send;
  send.apply(this, message);
  setTimeout(() => %s);
};
</script>
"""
"""Runs after the client's request of the page."""


@dataclasses.dataclass(frozen=True)
class Document:
    """ASGI middleware: adds the ``Link`` header and the inline scripts to documents; Plotly's script only on pages with
    figures."""

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = scope.get("headers", ())
        if any(name == b"accept" and b"text/html" in value for name, value in headers):
            plain = [(name, value) for name, value in headers if name != b"accept-encoding"]
            scope = {**scope, "headers": plain}  # an uncompressed answer can be edited
        await self.app(scope, receive, _Answer(scope, send))


class _Answer:
    """Passes answers on; edits documents as a whole."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._path, self._send = scope["path"], send
        self._asked = scope.get("raw_path") or self._path.encode()  # as the browser sees it
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
            # These headers describe Streamlit's part of the document only.
            own = (b"content-length", b"etag", b"last-modified", b"accept-ranges")
            headers = [(name, value) for name, value in headers if name.lower() not in own]
            headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_document(headers: Any) -> bool:
    fields = dict(headers)
    return fields.get(b"content-type", b"").startswith(b"text/html") and b"content-encoding" not in fields


def _links(path: str) -> bytes:
    figures = [] if path in _WITHOUT_FIGURES else figure_scripts()
    links = [f"<{script}>; rel=modulepreload" for script in figures]
    return ", ".join(
        links + [f"<{x}>; rel=modulepreload; fetchpriority=low" for x in element_scripts()]
    ).encode()


def _scripts(path: str, length: int) -> bytes:
    """Scripts of a page; ``length``: characters of its path in the address."""
    figures = [] if path in _FIGURES_LATER else figure_scripts()
    draw = ", ".join(f'import(window.__streamlit.BACKEND_BASE_URL + "{script}")' for script in figures)
    return (_CONNECT % length + (_DRAW % draw if draw else "")).encode()
