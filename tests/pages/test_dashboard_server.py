"""What the served dashboard adds to Streamlit's server: an early hint, no waiting between packets."""

from __future__ import annotations

import asyncio
import gc
import gzip
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from dashboard_page_support import PAGES, open_page
from dashboard_support import APP
from streamlit import __file__ as STREAMLIT

from cufa.cli import main
from cufa.dashboard import document, pace, server
from cufa.problem.checks import install

DOCUMENT = b"<html><head><title>page</title></head><body></body></html>"


PASSED = {"passed": True, "headers": []}


def ask(
    middleware: Any,
    headers: dict[bytes, bytes],
    path: str = "/",
    kind: str = "http",
    answer: Sequence[Any] = (PASSED,),
) -> list[dict[str, Any]]:
    """What is sent to a request with these headers; the application behind the middleware sends ``answer``."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert answer == (PASSED,) or b"accept-encoding" not in dict(scope["headers"])
        for message in answer:
            await send(message)

    async def receive() -> dict[str, str]:
        return {"type": f"{kind}.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": "GET",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": b"seed=3",
    }
    asyncio.run(middleware(application)({**scope, "headers": list(headers.items())}, receive, send))
    return sent


def answer_of(
    content_type: bytes, path: str = "/roofline", body: bytes = DOCUMENT
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Header and body of an answer of this type that has passed the middleware, in two parts."""
    length = str(len(body)).encode()
    headers = [(b"content-type", content_type), (b"content-length", length), (b"etag", b"Streamlit's")]
    answer = [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": body[:20], "more_body": True},
        {"type": "http.response.body", "body": body[20:]},
    ]
    asked = {b"accept": b"text/html,*/*", b"accept-encoding": b"gzip"}
    sent = ask(document.Document, asked, path, answer=answer)
    assert [m["type"] for m in sent[:2]] == ["http.response.start", "http.response.body"]
    return list(sent[0]["headers"]), b"".join(m["body"] for m in sent[1:])


def scripts_of(path: str) -> list[str]:
    """What a document names in its header, each of which is there."""
    value = dict(answer_of(b"text/html; charset=utf-8", path)[0])[b"link"]
    scripts = re.findall(r"<(/static/js/[^>]+)>; rel=modulepreload", value.decode())
    assert len(scripts) == value.count(b"<") == len(set(scripts))
    assert all(server.compressed(script) for script in scripts)
    return scripts


def test_a_document_names_the_scripts_that_draw_figures_and_elements() -> None:
    first, *elements = scripts_of("/roofline")
    assert first.startswith("/static/js/PlotlyChart.")
    named = {Path(script).name.partition(".")[0] for script in elements}
    assert named > {"Html", "purify", "Selectbox", "NumberInput", "TextField"}  # and what these import
    assert "index" not in named  # which the document names itself


@pytest.mark.parametrize("path", ["/", "/doctor"])
def test_pages_without_such_figures_do_not_ask_for_it(path: str) -> None:
    """These pages load faster without 1.4 MB of Plotly."""
    assert scripts_of(path) == scripts_of("/roofline")[1:]


def test_other_answers_pass_unchanged() -> None:
    headers, body = answer_of(b"application/javascript")
    assert dict(headers)[b"etag"]
    assert (b"link" in dict(headers), body) == (False, DOCUMENT)


def test_a_document_says_where_the_server_is_and_begins_with_what_draws_figures() -> None:
    headers, body = answer_of(b"text/html; charset=utf-8")
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
    assert b"etag" not in dict(headers)  # it describes Streamlit's part only
    head, _, rest = body.partition(b"</head>")
    assert head.startswith(b"<html><head><title>page</title>")
    assert rest == b"<body></body></html>"
    assert b"location.pathname.slice(0, -9)" in head  # without the path of the page
    (script,) = re.findall(rb'import\([\w.]+ \+ "([^"]+)"\)', head)
    assert [script.decode()] == document.figure_scripts()
    assert b"slice(0, -7)" in answer_of(b"text/html", "/\u00e9")[1]  # /%C3%A9 in the browser
    for path in ("/", "/doctor", "/run"):
        assert b"import(" not in answer_of(b"text/html", path)[1]
    assert answer_of(b"text/html", body=b"no head")[1] == b"no head"


def test_streamlits_client_reads_what_the_document_tells_it() -> None:
    """Otherwise the client sends requests, and the page appears later."""
    scripts = (Path(STREAMLIT).parent / "static" / "static" / "js").glob("index.*.js")
    client = "".join(script.read_text(encoding="utf-8") for script in scripts)
    for name in ("window.__streamlit", *re.findall(r"\w+(?=:)", document._CONNECT)):
        assert name in client, name


def test_scripts_travel_compressed() -> None:
    (path,) = server.figure_scripts()
    sent = ask(server.Compressed, {b"accept-encoding": b"gzip, br"}, path)
    headers, body = dict(sent[0]["headers"]), sent[1]["body"]
    original = Path(STREAMLIT).with_name("static") / path.lstrip("/")
    assert headers[b"content-encoding"] == b"gzip"
    assert headers[b"content-type"].startswith(b"text/javascript")
    assert gzip.decompress(body) == original.read_bytes()
    assert len(body) < 0.4 * original.stat().st_size
    for other, encoding in (
        (path, b"identity"),
        ("/static/js/none.js", b"gzip"),
        ("/static/../__init__.py", b"gzip"),
        ("/static/../../pathlib.js", b"gzip"),
        ("/_stcore/health", b"gzip"),
    ):
        assert ask(server.Compressed, {b"accept-encoding": encoding}, other) == [PASSED]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("origin", "served"),
    [
        (None, True),
        (b"http://localhost:8501", True),
        (b"https://localhost:8501", True),
        (b"http://localhost:9999", False),  # another server on this machine
        (b"http://127.0.0.1:8501", False),
        (b"http://203.0.113.7:8501", False),
        (b"null", False),
        (b"", False),
    ],
)
def test_only_pages_served_here_are_answered(
    kind: str, origin: bytes | None, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes before Streamlit's, which would ask the internet for the machine's address."""
    from streamlit import net_util

    def looked_up() -> None:
        raise AssertionError("the internet was asked")

    monkeypatch.setattr(net_util, "get_external_ip", looked_up)
    headers = {b"host": b"localhost:8501"} | ({} if origin is None else {b"origin": origin})
    sent = ask(server.SameOrigin, headers, kind=kind)
    assert (sent == [PASSED]) is served
    if not served:
        assert sent[0].get("status", sent[0].get("code")) == (403 if kind == "http" else 1008)


def reply_of(path: str, accept: bytes = b"text/html") -> tuple[int | None, str]:
    """Status and text, or target, of what answers before Streamlit; None: Streamlit answers."""
    sent = ask(server.KnownPages, {b"accept": accept}, path)
    target = dict(sent[0]["headers"]).get(b"location", b"").decode()
    return sent[0].get("status"), target or b"".join(x.get("body", b"") for x in sent).decode()


def test_an_unknown_page_is_answered_by_the_addresses_of_all_pages() -> None:
    status, text = reply_of("/rooflin<e")
    assert status == 404 and "no page at /rooflin&lt;e" in text
    assert all(f'href="./{name}"' in text for name in PAGES[1:]) and 'href="./"' in text
    assert reply_of(f"/{PAGES[0]}") == (307, "./?seed=3")
    for path in ("/", f"/{PAGES[1]}", "/_stcore/health", "/static/js/index.js"):
        assert reply_of(path)[0] is None
    assert reply_of("/favicon.ico", b"image/*")[0] is None


def test_connections_send_their_packets_at_once() -> None:
    with socket.socket() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server.send_at_once()
        client.connect(listening.getsockname())
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_pages_need_is_there_before_the_first_visitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(server, "_COMPILE_AFTER", 0)
    before = gc.get_freeze_count()
    server.prepare()
    assert gc.get_freeze_count() > before  # garbage collection skips these objects
    for module in ("plotly.graph_objects", "pandas", "cufa.dashboard.views.masked_tile"):
        assert module in sys.modules
    from cufa.dashboard.views import occupancy_view

    if occupancy_view.compiler().missing is None:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("static/*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_command_starts_streamlit_on_this_very_cufa(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append((command, env)))
    result = CliRunner().invoke(main, ["dashboard", "--no-browser", "--port", "8700"])
    assert result.exit_code == 0, result.output
    (command, environment), *_ = started
    assert command[1:5] == ["-m", "streamlit", "run", str(Path(APP).with_name("server.py"))]
    assert "--server.port=8700" in command
    assert not any("headless" in argument for argument in command)
    assert environment["CUFA_DASHBOARD_OPEN_BROWSER"] == "0"
    assert CliRunner().invoke(main, ["dashboard"]).exit_code == 0
    assert started[1][1]["CUFA_DASHBOARD_OPEN_BROWSER"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(APP).parents[1])


def test_a_port_that_is_taken_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["dashboard", "--no-browser", "--port", port])
    assert result.exit_code == 2
    assert f"--port {port}: Address already in use" in result.output


def test_the_command_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else real(name))
    result = CliRunner().invoke(main, ["dashboard"])
    assert result.exit_code == 3
    assert install("dashboard") in result.output


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lengths of the pauses of a served page; nothing pauses."""
    found: list[float] = []
    monkeypatch.setattr(pace, "_is_served", True)
    monkeypatch.setattr(pace, "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_first_page_waits_after_its_figure_and_an_answer_after_its_sentence(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_page("masked_work")
    assert waits == [pace._LASTING[pace.FIGURE], pace._LASTING[pace.DESCRIPTION]]
    app.run()
    assert waits[2:] == [pace._LASTING[pace.SENTENCE]]
    monkeypatch.setattr(pace, "_is_served", False)
    open_page("masked_work").run()
    assert len(waits) == 3
