"""The server of `cufa dashboard`: the script ``app.py``, optimised for the time to the first figure.

Documents name their scripts early (:mod:`cufa.dashboard.document`), scripts are compressed, pages pause while the
browser draws (:mod:`cufa.dashboard.pace`), and the process prepares shared data before the first visit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import gzip
import html
import importlib
import os
import pkgutil
import socket
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamlit as st
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from cufa.commands.dashboard import OPEN_BROWSER, make_importable

make_importable()

from cufa.dashboard import PAGES, pace  # noqa: E402 - importable after make_importable()
from cufa.dashboard.document import Document, element_scripts, figure_scripts  # noqa: E402

_NAMES = [name for name, _, _ in PAGES]
_COMPILE_AFTER = 3.0
"""Seconds without background compilation: an immediate first visitor gets all cores."""


@dataclasses.dataclass(frozen=True)
class Compressed:
    """ASGI middleware: compresses Streamlit's scripts and style sheets to a third. They are most bytes of a first
    visit."""

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        accepted = dict(scope.get("headers", ())).get(b"accept-encoding", b"")
        if scope["type"] != "http" or scope["method"] != "GET" or b"gzip" not in accepted:
            await self.app(scope, receive, send)
            return
        body = await asyncio.to_thread(compressed, scope["path"])
        if body is None:
            await self.app(scope, receive, send)
            return
        # File names change with their contents.
        headers = {
            "content-encoding": "gzip",
            "vary": "accept-encoding",
            "cache-control": "public, immutable, max-age=31536000",
        }
        kind = "text/css" if scope["path"].endswith(".css") else "text/javascript"
        await Response(body, headers=headers, media_type=kind)(scope, receive, send)


@functools.lru_cache(256)
def compressed(path: str) -> bytes | None:
    """A compressed script or style sheet of Streamlit by its path; None for other paths."""
    root = Path(st.__file__).with_name("static").resolve()
    file = (root / path.lstrip("/")).resolve()
    if not path.startswith("/static/") or file.suffix not in (".js", ".css") or not file.is_relative_to(root):
        return None
    return gzip.compress(file.read_bytes(), 6, mtime=0) if file.is_file() else None


@dataclasses.dataclass(frozen=True)
class KnownPages:
    """ASGI middleware: a document request for an address without a page is answered with the addresses of all pages.

    Streamlit would show its first page, whatever the address.
    """

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, wanted = scope.get("path", ""), dict(scope.get("headers", ())).get(b"accept", b"")
        name = path.strip("/")
        if scope["type"] != "http" or b"text/html" not in wanted or name in ("", *_NAMES[1:]) or "/" in name:
            await self.app(scope, receive, send)
            return
        if name == _NAMES[0]:  # the first page's address is the root
            await RedirectResponse("./?" + scope["query_string"].decode())(scope, receive, send)
            return
        addresses = {name: "" if name == _NAMES[0] else name for name in _NAMES}
        listed = ", ".join(f'<a href="./{x}">{name.replace("_", " ")}</a>' for name, x in addresses.items())
        text = f"<p>The dashboard has no page at /{html.escape(name)}. Its pages: {listed}.</p>"
        document = f"<!doctype html><title>No such page · cufa</title>{text}"
        await HTMLResponse(document, 404)(scope, receive, send)


@dataclasses.dataclass(frozen=True)
class SameOrigin:
    """ASGI middleware: refuses requests and sockets from pages of other origins.

    Streamlit would accept any page of ``http://localhost:<port>``, and would ask a server on the internet for this
    machine's address to decide about other origins.
    """

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or _is_same_origin(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connect message
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PlainTextResponse("This page is not served to other origins.", 403)(scope, receive, send)


def _is_same_origin(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Programs and followed links send no origin; scripts of a page always do."""
    fields = {name: value for name, value in headers if name in (b"host", b"origin")}
    origin = fields.get(b"origin")
    return origin is None or origin in (
        b"http://" + fields.get(b"host", b""),
        b"https://" + fields.get(b"host", b""),
    )


def prepare() -> None:
    """Imports, records and first compilations, for which the first visitor would wait."""
    for path in (*figure_scripts(), *element_scripts()):
        compressed(path)
    import pandas  # noqa: F401 - used by Streamlit for tables

    from cufa.dashboard import theme, views
    from cufa.dashboard.model import counters, devices, evidence, tilings

    for module in pkgutil.iter_modules(views.__path__):
        importlib.import_module(f"{views.__name__}.{module.name}")
    for palette in theme.PALETTES:
        theme.template(palette)
    devices.cpu_name()
    with contextlib.suppress(ValueError):  # damaged: the pages show the error
        for m in evidence.measurements():
            _ = m.timing.p50
    counters.inside_traces()
    importlib.import_module(f"{views.__name__}.understand_view").real_size("forward")
    _keep_what_is_there()
    time.sleep(_COMPILE_AFTER)
    with contextlib.suppress(ValueError):
        tilings.prepare()
    importlib.import_module(f"{views.__name__}.occupancy_view").compile_first()
    importlib.import_module(f"{views.__name__}.machine_code_view").list_first()
    _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Exempt permanent objects from garbage collection, which Streamlit runs after each page run: 0.2 s otherwise."""
    gc.collect()
    gc.freeze()


def send_at_once() -> int:
    """Switch off Nagle's algorithm on the listening socket, found among the open files; connections inherit the option.
    Returns the port.

    asyncio does not recognise Streamlit's socket as TCP and leaves the algorithm on: each of a page's hundred files
    would wait 40 ms between header and body.
    """
    port = 0
    for number in os.listdir("/dev/fd"):
        # OSError: not a socket, or the descriptor of this listing.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as sock:
            if sock.family != socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                port = sock.getsockname()[1]
    return port


@asynccontextmanager
async def lifespan(_: st.App) -> AsyncIterator[None]:
    """The server answers at once; a thread prepares the rest."""
    port = send_at_once()
    pace.begin()
    if os.environ.get(OPEN_BROWSER) == "1" and port:
        threading.Thread(target=webbrowser.open, args=(f"http://127.0.0.1:{port}",), daemon=True).start()
    threading.Thread(target=prepare, name="prepare", daemon=True).start()
    yield


app = st.App(
    "app.py",
    lifespan=lifespan,
    middleware=[Middleware(x) for x in (SameOrigin, KnownPages, Compressed, Document)],
)
