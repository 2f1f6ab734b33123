"""8 bits on the pages: error against time in Compare, a tile in e4m3 in Understand, the suite fp8 in Run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_measured_support import wait
from dashboard_page_support import figures, has, open_page, words
from dashboard_run_support import end_worker

import cufa
from cufa.dashboard.model import softmax_row
from cufa.dashboard.model.eight_bits import EightBits
from cufa.dashboard.model.walkthrough import BLOCK, Case, walk
from cufa.dashboard.views.run_controls import _only
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.store import Store
from cufa.measure.float8_cases import accuracy
from cufa.measure.suites import SUITES, make


@pytest.mark.in_turn
def test_errors_of_a_run_against_its_times(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "runs")
    cases = tuple(
        x for x in accuracy(make(1, 1, 64, 32, "bfloat16"), 256) if x.distribution in ("normal", "needle")
    )
    client.submit(store, Job("suite fp8", "cpu", cases, 0.01))
    wait(store)
    end_worker(store)
    monkeypatch.setenv("CUFA_RUNS_DIR", str(store.root))
    app = open_page("compare", inputs="needle")
    said = words(app)
    has(
        said,
        "Error against time in 8 bits",
        "has the smallest error in 8 bits",
        "of the needles",
        "Times are NumPy's",
    )
    drawn = {json.dumps(x["layout"]["xaxis"]["title"]): x for x in figures(app)}
    points = next(x for name, x in drawn.items() if "median time" in name and len(x["data"]) == 9)
    assert points["layout"]["yaxis"]["type"] == "log"
    assert {t["name"] for t in points["data"]} >= {"bfloat16", "e4m3 per head", "e4m3 per block, rotated"}
    spread = next(x for name, x in drawn.items() if "absolute error" in name)
    assert [t["name"] for t in spread["data"]] == ["bfloat16", points["data"][-1]["name"]]
    assert spread["data"][0]["y"][-1] == 1.0 and max(spread["data"][1]["x"]) > max(spread["data"][0]["x"])


def test_the_suite_keeps_its_precisions() -> None:
    for case in SUITES["fp8"].cases(None):
        assert _only(case, ["fa2"]).contenders == case.contenders
    plain = next(iter(SUITES["quick"].cases(None)))
    assert [c.algorithm for c in _only(plain, ["fa2"]).contenders] == ["fa2"]


@pytest.mark.parametrize("case", [Case("fa2", "causal", 3), Case("fa1"), Case("decode", seed=5)], ids=str)
def test_a_tile_in_8_bits_is_what_cufa_computes(case: Case) -> None:
    """The e4m3 call on the keys of the tile, with columns padded to 16."""
    found = walk(case)
    row = softmax_row.row_of(found, 4)
    bits, keys = EightBits(row), slice(row.step.kv_block * BLOCK, (row.step.kv_block + 1) * BLOCK)
    given: dict[str, Any] = {}
    for role, x in (("q", found.Q), ("k", found.K), ("v", found.V)):
        wide = np.pad(x, ((0, 0), (0, 8)))[None, None]
        x8, given[f"{role}_scale"] = cufa.quantize(wide, role=role, per="tensor")
        given[role] = x8.rows() if role == "v" else x8
        assert given[f"{role}_scale"] == pytest.approx(bits.scales[role])
    query = row.step.q_block * BLOCK + row.row
    given["q"] = given["q"][:, :, query : query + 1]
    for role in "kv":
        given[role] = given[role][:, :, keys][:, :, bits.seen]
    out = cufa.flash_attention(**given, scale=found.problem.scale, out_dtype="float32", device="cpu")
    np.testing.assert_allclose(out[0, 0, 0, :8], bits.result8, atol=2e-3)
    assert len(bits.lines()) == bits.seen.sum()
