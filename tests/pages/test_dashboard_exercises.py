"""Exercises: each right answer passes, each typical wrong answer fails with its reason; and the page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dashboard_page_support import open_page, words

from cufa.dashboard.model import exercises, exercises_executed
from cufa.dashboard.model.exercises import BEFORE, BLOCK, CACHED, STEPS, TOKENS
from cufa.dashboard.model.exercises_executed import PLANTED, STATEMENTS
from cufa.dashboard.views import exercises_view
from cufa.kernels import KERNELS

TILES = {i: {i - 2, i - 1, i} - {-1, -2} for i in range(TOKENS // BLOCK)}
COMMIT, WAIT, SYNC = STATEMENTS


def test_tiles() -> None:
    query, key = np.indices((TOKENS, TOKENS))
    seen = (key <= query) & (query - key <= BEFORE)
    blocks = seen.reshape(6, BLOCK, 6, BLOCK).any(axis=(1, 3))
    assert {i: set(np.flatnonzero(row)) for i, row in enumerate(blocks)} == TILES
    assert exercises.tiles(TILES).right
    for row, why in (
        ({3, 2}, "compute it. Query 48 sees key 28"),
        ({3, 2, 1, 0}, "skip it. The oldest key that these queries see is 48 − 20 = 28"),
        ({3, 2, 1, 4}, "skip it. All these keys come after query 63"),
    ):
        verdict = exercises.tiles({**TILES, 3: row})
        assert not verdict.right and why in verdict.why and "Query block 3" in verdict.why


def test_order() -> None:
    right = {a for a in itertools.permutations(STEPS) if exercises.order(a).right}
    assert right == {("maximum", *middle, "add") for middle in itertools.permutations(("weights", "rescale"))}
    assert "nan" in exercises.order(("weights", "maximum", "add", "rescale")).why
    assert "α = exp(m − m) = 1" in exercises.order(("rescale", "maximum", "weights", "add")).why
    assert "also shrinks" in exercises.order(("maximum", "weights", "add", "rescale")).why
    assert "another tile" not in exercises.order(("maximum",) * 4).why
    assert not exercises.order(("add",) * 4).right


def test_tile() -> None:
    assert [name for name in exercises.TILES if exercises.tile(name).right] == ["128 × 32"]
    assert "2 take 206 of 164 KiB" in exercises.tile("128 × 64").why
    assert "read them 2 times as often" in exercises.tile("64 × 32").why


def test_ragged() -> None:
    assert exercises.balanced_span() == -(-sum(CACHED) // 64 // 8) + 2  # a share may span two sequences
    assert exercises.ragged((5, 1)).right
    assert "One thread block has 64 tiles" in exercises.ragged((1, 1)).why
    assert "do not fit on 8 SMs" in exercises.ragged((8, 1)).why


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (STATEMENTS, ""),
        (PLANTED, "may pass this barrier while its own copies are in flight"),
        ((COMMIT, "", SYNC), "Nothing waits"),
        ((WAIT, COMMIT, SYNC), "only groups that are committed before it"),
        ((COMMIT, WAIT, ""), "rows that other threads still copy"),
    ],
)
@pytest.mark.sampled(fixed=2, dated=1)
def test_race(lines: tuple[str, str, str], why: str) -> None:
    verdict = exercises_executed.race(lines)
    assert verdict.right == (not why) and why in verdict.why
    assert verdict.right or "forward/fa1/kernel.cu:" in verdict.why
    assert KERNELS["fa1_forward"].source == exercises_executed.KERNEL


@pytest.mark.emulate
def test_swizzle() -> None:
    assert exercises_executed.swizzle(3, 4, 3).right  # the 128-byte swizzle of the copy engine
    wrong = {(0, 4, 3): 8, (1, 4, 3): 4, (2, 4, 3): 2, (3, 4, 1): 4, (3, 4, 4): 2, (3, 5, 3): 2}
    for answer, most in wrong.items():
        verdict = exercises_executed.swizzle(*answer)
        assert not verdict.right and f"{most} of 8 rows" in verdict.why


@pytest.mark.parametrize("name", exercises_view.tasks())
def test_a_wrong_answer_is_explained_on_the_page(name: str) -> None:
    """What a page begins with is wrong."""
    app = open_page("exercises", exercise=name)
    assert not app.error and "0 of 6 solved" in words(app)
    app.button(f"exercises.check.{name}").click().run()
    assert not app.exception and len(app.error) == 1 and "Not yet" in app.error[0].value


def test_a_right_answer_is_kept_until_it_changes() -> None:
    app = open_page("exercises")
    for i, row in TILES.items():
        app.pills(f"exercises.row.{i}").set_value(sorted(row))
    app.button("exercises.check.tiles").click().run()
    assert "15 of 36 tiles" in app.success[0].value and "1 of 6 solved: Tiles of a mask" in words(app)
    app.pills("exercises.row.0").set_value([]).run()
    assert not app.success and not app.error
