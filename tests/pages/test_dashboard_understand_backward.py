"""The backward on the page Understand: every number that it shows against the library, what it says, and its links."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from dashboard_page_support import open_page, parameters, words

import cufa
from cufa.dashboard.charts import walkthrough_backward as chart
from cufa.dashboard.model import traffic_steps, walkthrough_words
from cufa.dashboard.model import walkthrough_backward_words as said_of
from cufa.dashboard.model.walkthrough import BLOCK, MASKS, Case
from cufa.dashboard.model.walkthrough_backward import ALGORITHM, CONVERT, PREPARE, walk_backward
from cufa.dashboard.theme import DARK, LIGHT
from cufa.schedule.schedule import Tile

CASES = [Case(ALGORITHM, mask, seed) for mask in MASKS for seed in (0, 3)]


def rows_of(x: np.ndarray, block: int) -> np.ndarray:
    return x[block * BLOCK : (block + 1) * BLOCK]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_walk_ends_where_the_call_does(case: Case) -> None:
    found = walk_backward(case)
    q, k, v, dout = (x[None, None] for x in (found.Q, found.K, found.V, found.dO))
    mask = MASKS[case.mask]
    out, lse = cufa.flash_attention(q, k, v, mask=mask, device="cpu", return_lse=True)
    called = cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask, device="cpu")
    exact = cufa.attention_reference_backward(dout, q, k, v, mask=mask)
    np.testing.assert_allclose(found.L, lse[0, 0], atol=2e-3)
    np.testing.assert_allclose(
        found.D, (found.dO.astype(np.float32) * found.O.astype(np.float32)).sum(axis=1), rtol=1e-5, atol=1e-6
    )
    for shown, of_call, best in zip(found.gradients, called, exact, strict=True):
        np.testing.assert_allclose(shown.astype(float), of_call[0, 0].astype(float), atol=5e-3)
        np.testing.assert_allclose(shown.astype(float), best[0, 0], atol=2e-2)
    for block in range(4):
        dQ = [step for step in found.steps if step.q_block == block][-1].after[0]
        np.testing.assert_array_equal(dQ.astype(np.float16), rows_of(found.gradients[0], block))
        last = [step for step in found.steps if step.kv_block == block and step.is_last]
        assert len(last) == 1
        for name, gradient, best in zip((1, 2), found.gradients[1:], found.exact[1:], strict=True):
            np.testing.assert_array_equal(last[0].after[name].astype(np.float16), rows_of(gradient, block))
            assert (last[0].error >= np.abs(last[0].after[name] - rows_of(best, block)).max(axis=1)).all()
        assert last[0].error.max() < 2e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_tile_adds_what_its_matrices_say(case: Case) -> None:
    found = walk_backward(case)
    scale = BLOCK**-0.5
    left: dict[tuple[str, int], np.ndarray] = {}
    for step in found.steps:
        if step.kernel:
            continue
        own = ("dQ", step.q_block), ("dK", step.kv_block), ("dV", step.kv_block)
        for place, before in zip(own, step.before, strict=True):
            np.testing.assert_array_equal(before, left.get(place, np.zeros_like(before)))
        added: list[np.ndarray | int] = [0, 0, 0]
        if step.tile is not None:
            Q, dO, K = (
                rows_of(found.Q, step.q_block),
                rows_of(found.dO, step.q_block),
                rows_of(found.K, step.kv_block),
            )
            np.testing.assert_array_equal(step.tile.delta, rows_of(found.D, step.q_block))
            np.testing.assert_array_equal(step.tile.lse, rows_of(found.L, step.q_block))
            np.testing.assert_allclose(
                step.tile.dS, step.tile.P * (step.tile.dP - step.tile.delta[:, None]), rtol=1e-5, atol=1e-6
            )
            added = [scale * step.tile.dS @ K, scale * step.tile.dS.T @ Q, step.tile.P.T @ dO]
        for before, more, after in zip(step.before, added, step.after, strict=True):
            np.testing.assert_allclose(before + more, after, rtol=1e-4, atol=1e-5)
        left |= dict(zip(own, step.after, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_are_outside_and_skipped_tiles_are_those_of_the_schedule(case: Case) -> None:
    found = walk_backward(case)
    first, *tiles, last = found.steps
    assert (first.kernel, last.kernel) == (PREPARE, CONVERT)
    assert [(s.kv_block, s.q_block) for s in tiles] == [(j, i) for j in range(4) for i in range(4)]
    for step in tiles:
        skipped = found.schedule.tiles[step.q_block, step.kv_block] == Tile.SKIPPED
        assert step.moved.skipped == skipped == (step.tile is None) == (step.number == 0)
        titles = [title for title, _ in said_of.phases(found, step)]
        assert titles == (["Skip"] if skipped else ["Load", "Recompute", "Back through softmax", "Add"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meters_end_at_what_the_model_counts(case: Case) -> None:
    found = walk_backward(case)
    for name, model in traffic_steps.BACKWARD_MODELS.items():
        read, written = walkthrough_words.meter_totals(found, name)
        assert len(read) == len(written) == len(found.steps) + 1
        assert (read[-1], written[-1]) == traffic_steps.total(model(found.problem, found.schedule))
        assert read[0] == written[0] == 0 and read == sorted(read) and written == sorted(written)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_data_is_json_and_sentences_say_what_the_numbers_are(case: Case) -> None:
    found = walk_backward(case)
    for palette in (LIGHT, DARK):
        content = json.dumps(chart.data(found, palette), allow_nan=False)
        assert len(content) < 150_000
    shown = json.loads(content)["steps"]
    for n, (step, kept) in enumerate(zip(found.steps, shown, strict=True)):
        said = said_of.phases(found, step)
        assert [list(phase) for phase in said] == kept["phases"]
        text = (
            " ".join(text for _, text in said)
            + said_of.error(found, step)
            + walkthrough_words.meter(found, n)
        )
        assert not re.search(r"\bnan\b|\binf\b|  ", text), text
        assert f"{step.moved.read:,} B" in text or not step.moved.read
        assert (
            sum(int(x.replace(",", "")) for x in re.findall(r"([0-9,]+) B\.", said[-1][1]))
            == step.moved.written
        )
        if step.tile is not None:
            assert kept["dS"] == step.tile.dS.astype(float).round(4).tolist()
            hidden = int((~MASKS[case.mask].visible(np.arange(32), np.arange(32), 32, 32))[
                step.q_block * BLOCK : (step.q_block + 1) * BLOCK, step.kv_block * BLOCK : (step.kv_block + 1) * BLOCK
            ].sum())  # fmt: skip
            assert (f"hides {hidden} of 64" in said[1][1]) == (hidden > 0)


def test_what_lies_in_shared_memory_is_what_the_kernel_declares() -> None:
    spec = cufa.kernels.KERNELS["fa2_backward"]
    names = {x.name for x in spec.shared_memory(spec.configs[0], 64)}
    assert {"K", "V", "Q", "DO", "ROWS", "DS"} <= names


@pytest.mark.parametrize(
    "link", [{}, {"mask": "causal", "seed": "7", "step": "18"}, {"mask": "window", "step": "1"}], ids=str
)
def test_a_link_shows_what_it_says(link: dict[str, str]) -> None:
    link = {"algorithm": ALGORITHM, **link}
    app = open_page("understand", **link)
    assert parameters(app) == link
    assert "The backward recomputes P" in words(app)
    assert not app.warning


def test_the_backward_has_steps_of_its_own() -> None:
    app = open_page("understand", algorithm=ALGORITHM, step="18")
    app.segmented_control[0].set_value("fa2").run()
    assert not app.exception
    assert parameters(app) == {"step": "16"}
