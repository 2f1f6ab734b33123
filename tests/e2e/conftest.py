"""The dashboard in a real Chromium: one served dashboard and one browser for all tests here. Where there is no Chromium
they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# The packages that only these tests need are imported by the fixtures: a test file that lacks one is skipped.
if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from cufa.dashboard.worker.store import Store


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of this folder."""
    item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Store of the served dashboard; its worker ends with the tests."""
    from dashboard_run_support import end_worker

    from cufa.dashboard.worker.store import Store

    store = Store(tmp_path_factory.mktemp("runs"))
    yield store
    end_worker(store)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, runs: Store) -> Iterator[str]:
    """Address of the dashboard."""
    from dashboard_browser import CHROMIUM, serve

    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with serve(tmp_path_factory.mktemp("served"), runs.root) as address:
        yield address


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Closed before other tests: an open Playwright blocks other event loops of the process."""
    from dashboard_browser import ARGUMENTS, CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()
