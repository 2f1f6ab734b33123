"""The dashboard in a real Chromium: every page at several widths, masks, links, access."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from dashboard_browser import MASKED, PATIENCE, Visit, address_of, assert_nothing_is_cut, place_of, screenshot
from dashboard_page_support import PAGES
from playwright.sync_api import Browser, expect
from sampling import of_today

#: The page Occupancy compiles every tiling of a kernel for every architecture, in the background: this one has one.
#: The page Occupancy compiles every tiling of a kernel for every architecture, in the background: this one has one.
FEWEST_BUILDS = "kernel=naive"
#: Views of pages that have controls, figures or tables of their own.
VIEWS = (
    *(f"{name}?nonsense=1&{FEWEST_BUILDS if name == 'occupancy' else ''}" for name in PAGES),
    "masked_work?mask=documents&lengths=700,300,4x200&sq=2048&sk=2048",
    "masked_work?two=1&b_alg=fa2_noskip&b_mask=window&sq=2048&sk=2048",
    "masked_work?alg=fa3&d=128&sq=2048&sk=2048&batch=2&heads=32",  # with a trace from inside a block
    "understand?algorithm=decode&step=9",
    "understand?mask=window&step=15&own=1&q=1,2&k=3",
    "understand?algorithm=fa2_backward&step=7",
    *(f"exercises?exercise={name}" for name in ("order", "tile", "ragged", "race", "swizzle")),
)


@pytest.mark.parametrize("view", of_today(VIEWS, "views in windows of any width"))
def test_nothing_is_cut_at_any_width(server: str, browser: Browser, view: str) -> None:
    name, _, link = view.partition("?")
    visit = Visit(browser, of_today(["light", "dark"], f"theme of {view}", fixed=0)[0])
    page = visit.open(f"{server}/{address_of(name)}?{link}")
    notice = page.get_by_test_id("stAlert").filter(has_text="'nonsense'")
    expect(notice).to_have_count(int("nonsense" in link))
    if name == "exercises":
        page.get_by_role("button", name="Check my answer").click()
        expect(page.get_by_role("alert").filter(has_text="Not yet.")).to_be_visible()
    for width in (1440, 800, 390):
        assert_nothing_is_cut(page, width)
    for word in page.locator(".cufa-term").all()[:8]:  # an explanation is not wider than the narrow window
        word.focus()
        assert_nothing_is_cut(page, 390)
    screenshot(page, re.sub(r"\W+", "-", view))
    visit.close()


@pytest.mark.in_turn
@pytest.mark.parametrize("theme", of_today(["light", "dark"], "theme", fixed=0))
def test_every_page_by_the_sidebar(server: str, browser: Browser, theme: str) -> None:
    """Each comes to its verdict without an error, its figures have names for screen readers, and in a window of any
    width all of its choices are in sight. A day has three of the pages."""
    visit = Visit(browser, theme)
    page = visit.open(f"{server}/{address_of('occupancy')}?{FEWEST_BUILDS}")
    links = page.get_by_test_id("stSidebarNavLink")
    expect(links).to_have_count(len(PAGES))
    for name in of_today(PAGES, "pages by the sidebar", dated=2):
        links.nth(PAGES.index(name)).click()
        page.wait_for_url(re.compile(re.escape(f"{server}/{address_of(name)}") + r"(\?.*)?$"))
        visit.settle()
        expect(page.locator(".cufa-verdict").first).to_be_visible()
        if name == "masked_work":
            expect(page.get_by_role("figure", name="Grid of 32 query blocks")).to_be_visible()
        for figure in page.get_by_test_id("stPlotlyChart").all():
            expect(figure).to_have_attribute("aria-label", re.compile(".{41}", re.DOTALL))
        screenshot(page, f"{name}-{theme}")
        for width in of_today([1000, 800, 600], f"width of {name}", fixed=0):
            assert_nothing_is_cut(page, width)
        page.set_viewport_size(visit.size)
    links.nth(2).focus()
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outline")
    assert "solid" in outline and not outline.endswith(" 0px")
    visit.close()


@pytest.mark.in_turn
def test_a_link_takes_the_shape_along(server: str, browser: Browser) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=3000&sk=5000&mask=window&left=300&d=64&alg=fa3&b_alg=fa1")
    page.get_by_role("link", name="Roofline of this").click()
    page.wait_for_url(re.compile(r"/roofline\?.*of=forward__4__16__16__3000__5000__64__bfloat16"))
    visit.settle()
    expect(page.locator(".cufa-verdict", has_text="3000×5000")).to_be_visible()
    page.get_by_role("link", name="Run this").click()
    page.wait_for_url(re.compile(r"/run\?.*left=300"))
    visit.settle()
    expect(page.get_by_role("spinbutton", name="Keys before")).to_have_value("300")
    expect(page.get_by_role("spinbutton", name="Queries", exact=True)).to_have_value("3000")
    page.get_by_role("link", name="Masked work of this").click()
    page.wait_for_url(re.compile(r"/masked_work\?.*left=300"))
    visit.settle()  # until then, Run's own field of keys may be there too
    expect(page.get_by_role("spinbutton", name="Keys", exact=True)).to_have_value("5000")
    expect(page.get_by_role("radio", name="window", exact=True)).to_be_checked()
    visit.close()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("link", "x", "y", "blocks", "said"),
    [  # 8 × 16 tiles of 128 × 64, and 16 × 8 tiles of 64 × 128, of which a click selects a column
        ("", 3.5 / 16, 5.5 / 8, {"Query block": "5", "Key block": "3"}, "Tile (5, {})"),
        ("&op=backward", 2.5 / 8, 13.5 / 16, {"Key block": "2"}, "Key block {} visits "),
    ],
    ids=["forward", "backward"],
)
def test_a_click_or_the_keyboard_selects_a_tile_and_the_link_carries_it(
    server: str, browser: Browser, link: str, x: float, y: float, blocks: dict[str, str], said: str
) -> None:
    visit = Visit(browser)
    page = visit.open(f"{server}/{MASKED}?sq=1024&sk=1024{link}")
    page.set_viewport_size({"width": 1360, "height": 1400})  # all of the grid
    grid = page.locator(".js-plotly-plot .nsewdrag").first
    expect(grid).to_be_visible()
    box = place_of(grid)
    page.mouse.click(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
    for name, number in blocks.items():
        expect(page.get_by_role("spinbutton", name=name)).to_have_value(number)
    visit.settle()
    key_block = int(blocks["Key block"])
    expect(page.locator("body")).to_contain_text(said.format(key_block))
    page.wait_for_url(re.compile(rf"[?&]k={key_block}\b"))
    screenshot(page, f"masked_work-selected{link[1:]}")
    page.reload()
    visit.settle()
    for name, number in blocks.items():
        expect(page.get_by_role("spinbutton", name=name)).to_have_value(number)
    field = page.get_by_role("spinbutton", name="Key block")
    field.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(field).to_have_value(f"{key_block + 1}")
    page.wait_for_url(re.compile(rf"[?&]k={key_block + 1}\b"))
    expect(page.locator("body")).to_contain_text(said.format(key_block + 1))
    visit.close()


def test_other_hosts_are_refused(server: str) -> None:
    """A foreign page whose name points to this address must not reach the dashboard."""
    port = int(server.rsplit(":", 1)[1])

    def status(host: str, origin: str = "") -> int:
        return int(handshake(port, host, origin or f"http://{host}").split()[1])

    assert status(f"127.0.0.1:{port}") == 101
    assert status("rebound.example.com") == 403
    assert status(f"127.0.0.1:{port}", f"http://localhost:{port}") == 403
    assert status(f"127.0.0.1:{port}", "http://localhost:1") == 403
    assert status(f"127.0.0.1:{port}", "http://203.0.113.7") == 403


def test_what_pages_are_sent_is_compressed(server: str) -> None:
    """The numbers of one large figure are a megabyte."""
    port = int(server.rsplit(":", 1)[1])
    answer = handshake(port, f"127.0.0.1:{port}", server)
    assert re.search(r"sec-websocket-extensions: permessage-deflate", answer, re.IGNORECASE)


def handshake(port: int, host: str, origin: str) -> str:
    """Header of the server's answer to a socket request."""
    request = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Origin: {origin}\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), PATIENCE / 1000) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").read1(4096).decode()


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
