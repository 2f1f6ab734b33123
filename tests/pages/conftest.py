"""Fixtures of the tests of pages and of the run engine."""

from __future__ import annotations

import importlib.util

import pytest
from dashboard_run_support import fresh, shared, store

__all__ = ["asked", "fresh", "shared", "store"]

if importlib.util.find_spec("streamlit"):  # the run engine's tests need no Streamlit
    from dashboard_measured_support import measured, measured_once, with_gpu, with_runs
    from dashboard_page_support import elsewhere, real_listing, shipped

    __all__ += ["elsewhere", "measured", "measured_once", "real_listing", "shipped", "with_gpu", "with_runs"]


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> None:
    """Tests of pages run without the user's files."""
    if hasattr(request.module, "open_page"):
        request.getfixturevalue("elsewhere")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Jobs that a page submits; none of them runs."""
    from cufa.dashboard.worker import client

    found: list[object] = []
    monkeypatch.setattr(
        client, "submit", lambda store, job: found.append(job) or "20260101T000000.000000-abcdef"
    )
    return found
