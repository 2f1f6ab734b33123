"""What the tests of pages share: opening one under Streamlit's AppTest, with nothing of the user's in sight."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

import streamlit as st
from dashboard_support import APP, make_trace, own_cache
from streamlit.testing.v1 import AppTest

from cufa import dashboard
from cufa.build import sass
from cufa.build.variants import Variant
from cufa.dashboard.model import compiled, devices, listed
from cufa.dashboard.views import occupancy_view
from cufa.measure import cards, inside, traces
from cufa.plan.planner import Plan

# Each AppTest reads what every installed package says of itself, looking for components: two thirds of its time.
with contextlib.suppress(
    ImportError, AttributeError
):  # Streamlit's own affair, and perhaps elsewhere one day
    from streamlit.components.v2 import manifest_scanner

    manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)

# Plotly takes the same few hundred names of properties apart again with each figure.
with contextlib.suppress(ImportError, AttributeError):
    from plotly import basedatatypes

    basedatatypes._str_to_dict_path_full = functools.cache(basedatatypes._str_to_dict_path_full)

st.config.set_option("browser.gatherUsageStats", False)  # as `cufa dashboard` does


PAGES = [name for name, _, _ in dashboard.PAGES]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No evidence, no cache, no GPU, unless a test brings some; nothing of the user's is touched."""
    monkeypatch.setenv("CUFA_CACHE_DIR", str(own_cache(tmp_path / "cache")))
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "runs"))
    use_records(tmp_path / "records", monkeypatch)
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    # Only what a page waits for is compiled: the table's hundred builds would take minutes.
    monkeypatch.setattr(compiled.Compiler, "want", want_one)
    monkeypatch.setattr(compiled.Compiler, "make", lambda self, variant: made_once(variant))
    monkeypatch.setattr(
        listed.Lister, "want", lambda self, variants: 1
    )  # the same, unless a test asks for it
    monkeypatch.setattr(occupancy_view, "compiler", occupancy_view.compiler)  # back after without_compiler()
    st.cache_data.clear()
    st.cache_resource.clear()
    yield tmp_path
    st.cache_resource.clear()


SHIPPED = cards.RECORDS_DIR


def use_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements and traces of this folder are the recorded ones."""
    monkeypatch.setattr(cards, "RECORDS_DIR", folder)
    monkeypatch.setattr(traces, "TRACES_DIR", folder / "traces")
    monkeypatch.setattr(inside, "INSIDE_DIR", folder / "inside")


@pytest.fixture
def shipped(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The records of the package."""
    use_records(SHIPPED, monkeypatch)
    return SHIPPED


real_want = compiled.Compiler.want
real_make = compiled.Compiler.make
real_list = listed.Lister.want


@pytest.fixture
def real_listing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds that the page Machine code asks for are made."""
    monkeypatch.setattr(listed.Lister, "want", real_list)
    monkeypatch.setattr(listed, "listing", lambda variant: listed_once(variant, sass.find_nvdisasm()))


@functools.cache
def listed_once(variant: Variant, disassembler: str | None) -> sass.Listing:
    """No test changes a source, NVRTC or what the disassembler says."""
    return sass.listing(variant)


@functools.cache
def made_once(variant: Variant) -> dict[str, Any]:
    """No test changes a source or NVRTC."""
    return real_make(compiled.Compiler.__new__(compiled.Compiler), variant)


def want_one(self: compiled.Compiler, variants: object) -> int:
    wanted = list(variants)  # type: ignore[call-overload]
    return real_want(self, wanted) if len(wanted) == 1 else 0


def open_page(name: str, **parameters: str) -> AppTest:
    """A page as a browser gets it from a link."""
    app = AppTest.from_file(APP, default_timeout=300)
    app.switch_page(f"screens/{name}.py")
    for key, value in parameters.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception, [e.value for e in app.exception]
    return app


#: A word that the glossary explains, in a sentence.
_TERM = re.compile(r'<span class="cufa-term"[^>]*>([^<]*)</span>')


def words(app: AppTest) -> str:
    """Everything that a page says, beside the sidebar."""
    main = app.main
    kinds = (main.title, main.header, main.markdown, main.caption, main.info, main.warning, main.error)
    html = [_TERM.sub(r"\1", element.proto.body) for element in main.get("html")]
    return "\n".join([*html, *(element.value for kind in kinds for element in kind)])


def has(text: str, *parts: str) -> None:
    """Each part is in the text."""
    for part in parts:
        assert part in text, f"{part!r} is missing in:\n{text}"


def save_trace(folder: Path, plan: Plan, device: str = "NVIDIA H200", **changes: Any) -> traces.Trace:
    """A trace of this plan from this card; ``changes`` overwrite its fields."""
    trace = make_trace(plan, **changes)
    trace.environment["device"] = device
    traces.save(trace, folder / "traces")
    return trace


def alts(app: AppTest) -> list[str]:
    """Descriptions of the figures."""
    return [e.proto.alt for e in app.get("plotly_chart")]


def figures(app: AppTest) -> list[dict[str, Any]]:
    """Figures as JSON."""
    return [json.loads(e.proto.spec) for e in app.get("plotly_chart")]


def parameters(app: AppTest) -> dict[str, str]:
    return {key: value[0] if isinstance(value, list) else value for key, value in app.query_params.items()}


#: What links say of this machine: defaults that depend on what is on it.
LOCAL = {"card", "on", "preset", "kernels", "run", "machine", "regime", "shapes", "base", "show", "suite", "shape", "a",
         "b", "ra", "rb", "record"}  # fmt: skip


def chosen(app: AppTest) -> dict[str, str]:
    """What a link says beside that."""
    return {name: value for name, value in parameters(app).items() if name not in LOCAL}


def without_compiler() -> None:
    """The next Compiler finds no NVRTC."""
    compiler = compiled.Compiler()
    compiler.missing = "NVRTC is not here"
    st.cache_resource.clear()
    occupancy_view.compiler = lambda: compiler  # type: ignore[assignment]
