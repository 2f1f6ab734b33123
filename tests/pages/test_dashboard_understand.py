"""The page Understand, forward and backward: its numbers against the library, its sentences and its links."""

from __future__ import annotations

import itertools
import json
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dashboard_page_support import open_page, parameters, words

import cufa
from cufa.dashboard.charts import walkthrough as chart
from cufa.dashboard.charts import walkthrough_backward as backward_chart
from cufa.dashboard.model import own_rows, softmax_row, traffic_steps, walkthrough_words
from cufa.dashboard.model import walkthrough_backward_words as said_of
from cufa.dashboard.model import walkthrough_fa3 as fa3
from cufa.dashboard.model.walkthrough import BLOCK, MASKS, MERGE, Case, walk, weights
from cufa.dashboard.model.walkthrough_backward import ALGORITHM, CONVERT, PREPARE, walk_backward
from cufa.dashboard.theme import DARK, LIGHT
from cufa.dashboard.views import understand_view
from cufa.kernels import KERNELS
from cufa.schedule.schedule import Tile

FORWARD = [Case(a, mask, seed) for a in ("fa1", "fa2") for mask in MASKS for seed in (0, 3)]
CASES = [*FORWARD, *(Case("decode", seed=1, parts=n) for n in (1, 2, 3, 4, 8))]
BACKWARD = [Case(ALGORITHM, mask, seed) for mask in MASKS for seed in (0, 3)]


def rows_of(x: np.ndarray, block: int) -> np.ndarray:
    return x[block * BLOCK : (block + 1) * BLOCK]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_walk_ends_where_the_call_does(case: Case) -> None:
    found = walk(case)
    q, k, v = (x[None, None] for x in (found.Q, found.K, found.V))
    out = cufa.flash_attention(q, k, v, mask=MASKS[case.mask], device="cpu")
    exact = cufa.attention_reference(q, k, v, mask=MASKS[case.mask])[0, 0]
    np.testing.assert_array_equal(found.exact, exact)
    np.testing.assert_allclose(found.out.astype(np.float64), out[0, 0].astype(np.float64), atol=2e-3)
    for block in range(4):
        last = [step for step in found.steps if step.q_block == block and step.tile is not None][-1]
        O = last.O if case.algorithm == "fa1" else last.O / last.tile.l_after[:, None]
        np.testing.assert_array_equal(O, last.ended)
        np.testing.assert_array_equal(O.astype(np.float16), rows_of(found.out, block))
        np.testing.assert_array_equal(last.error, np.abs(O - rows_of(exact, block)).max(axis=1))
        assert last.error.max() < 1e-5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_rescaled_and_what_is_added_make_the_new_output(case: Case) -> None:
    """Each step begins with the previous result of its rows."""
    found = walk(case)
    left: dict[tuple[int, int], np.ndarray] = {}
    for step in found.steps:
        if step.tile is None:
            continue
        place = step.q_block, step.thread_block
        np.testing.assert_array_equal(step.O_before, left.get(place, np.zeros_like(step.O)))
        added = step.tile.P @ rows_of(found.V, step.kv_block).astype(np.float32)
        if case.algorithm == "fa1":
            added /= np.where(step.tile.l_after == 0, 1, step.tile.l_after)[:, None]
        np.testing.assert_allclose(step.O_scaled + added, step.O, rtol=1e-5, atol=1e-6)
        left[place] = step.O


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_skipped_tiles_are_those_of_the_schedule(case: Case) -> None:
    found = walk(case)
    shown = {(s.q_block, s.kv_block): s for s in found.steps}
    assert len(shown) == len(found.steps) == 16
    for (i, j), step in shown.items():
        skipped = case.algorithm == "fa2" and found.schedule.tiles[i, j] == Tile.SKIPPED
        assert step.moved.skipped == skipped == (step.tile is None) == (step.number == 0)
        if skipped:
            assert [title for title, _ in walkthrough_words.phases(found, step)] == ["Skip"]
    order = [(s.q_block, s.kv_block) for s in found.steps]
    assert order == sorted(order, key=lambda at: at[::-1] if case.algorithm == "fa1" else at)


@pytest.mark.parametrize("splits", [2, 3, 4, 8])
def test_the_merge_is_the_librarys(splits: int) -> None:
    found = walk(Case("decode", seed=1, parts=splits))
    q = found.Q[None, :, None]
    out = cufa.flash_decode(q, found.K[None, None], found.V[None, None], num_splits=splits, device="cpu")
    merge = found.steps[-1]
    assert merge.kv_block == MERGE and len(merge.parts) == splits
    np.testing.assert_allclose(merge.O.astype(np.float16), out[0, :, 0], atol=2e-3)
    np.testing.assert_array_equal(merge.O.astype(np.float16), found.out)
    np.testing.assert_allclose(sum(part.share for part in merge.parts), 1, rtol=1e-5)
    np.testing.assert_allclose(
        sum(p.share[:, None] * p.O for p in merge.parts), merge.O, rtol=1e-4, atol=1e-6
    )
    assert merge.error.max() < 1e-5 < min(step.error.max() for step in found.steps[:-1])


@pytest.mark.parametrize("case", [*CASES, *BACKWARD], ids=str)
def test_meters_end_at_what_the_model_counts(case: Case) -> None:
    found = walk_backward(case) if case.algorithm == ALGORITHM else walk(case)
    for name in found.meters:
        read, written = walkthrough_words.meter_totals(found, name)
        assert len(read) == len(written) == len(found.steps) + 1
        model, steps = traffic_steps.BACKWARD_MODELS.get(name), iter(found.meters[name])
        assert (read[-1], written[-1]) == traffic_steps.total(
            model(found.problem, found.schedule) if model else steps
        )
        assert read[0] == written[0] == 0 and read == sorted(read) and written == sorted(written)


def drawn(of: ModuleType, found: object, most: int) -> list[dict[str, Any]]:
    """The steps as the browser gets them: JSON of fewer than ``most`` characters, in each palette."""
    content = [json.dumps(of.data(found, palette), allow_nan=False) for palette in (LIGHT, DARK)]
    assert max(map(len, content)) < most
    steps: list[dict[str, Any]] = json.loads(content[0])["steps"]
    return steps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_data_is_json_and_small(case: Case) -> None:
    found = walk(case)
    shown = drawn(chart, found, 120_000)
    for step, kept in zip(found.steps, shown, strict=True):
        assert len(kept["phases"]) == len(walkthrough_words.phases(found, step))
        if step.tile is not None:
            S = step.tile.S.astype(float).round(4)
            assert kept["S"] == np.where(np.isinf(S), None, S).tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sentences_say_what_the_numbers_are(case: Case) -> None:
    found = walk(case)
    for n, step in enumerate(found.steps):
        said = dict(walkthrough_words.phases(found, step))
        text = " ".join(said.values())
        text += walkthrough_words.error(found, step) + walkthrough_words.meter(found, n)
        assert not re.search(r"\b1 (rows|tiles)\b|\bnan\b|\binf\b|  ", text), text
        if step.tile is None:
            continue
        assert f"{step.moved.read:,} B" in said["Load"]
        assert (f"{step.moved.written:,} B" in said["Add"]) == (step.moved.written > 0)
        had = np.isfinite(step.tile.m_before)
        risen = int((had & (step.tile.m_after > step.tile.m_before)).sum())
        if risen:
            assert f"{risen} of 8 rows find" in said["Rescale"]
        else:
            assert "no" in said["Rescale"].lower()
        hidden = int(np.isinf(step.tile.S).sum())
        assert (f"hides {hidden} of them" in said["Score"]) == (0 < hidden < 64)


@pytest.mark.parametrize(
    ("kernel", "tiles", "others"),
    [("fa1_forward", "K V Q", ""), ("fa2_forward", "Q STAGES", ""), ("fa2_backward", "K V Q DO", "ROWS DS")],
)
def test_who_holds_what_is_what_the_kernels_declare(kernel: str, tiles: str, others: str) -> None:
    """Tiles of Q, K and V lie in the shared memory of each kernel; the forward's stages are tiles of K and of V."""
    spec = KERNELS[kernel]
    config = spec.configs[0]
    sizes = {x.name: x.size for x in spec.shared_memory(config, 64)}
    assert {*tiles.split(), *others.split()} <= sizes.keys()
    smaller = min(config.block_q, config.block_kv)
    assert all(sizes[name] >= smaller * 64 * 2 for name in tiles.split())


def test_the_real_size_is_of_the_kernels_tiles() -> None:
    moved = understand_view.real_size("backward")
    assert moved["naive_backward"] > 2 * moved["fa2_backward"] > 0
    moved = understand_view.real_size("forward")
    assert moved["naive"] > 4 * moved["fa1"] > 4 * moved["fa2"] > 0


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_the_backward_ends_where_the_call_does(case: Case) -> None:
    found = walk_backward(case)
    q, k, v, dout = (x[None, None] for x in (found.Q, found.K, found.V, found.dO))
    mask = MASKS[case.mask]
    out, lse = cufa.flash_attention(q, k, v, mask=mask, device="cpu", return_lse=True)
    called = cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask, device="cpu")
    exact = cufa.attention_reference_backward(dout, q, k, v, mask=mask)
    np.testing.assert_allclose(found.L, lse[0, 0], atol=2e-3)
    D = (found.dO.astype(np.float32) * found.O.astype(np.float32)).sum(axis=1)
    np.testing.assert_allclose(found.D, D, rtol=1e-5, atol=1e-6)
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


@pytest.mark.parametrize("case", BACKWARD, ids=str)
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
            Q, dO = (rows_of(x, step.q_block) for x in (found.Q, found.dO))
            K = rows_of(found.K, step.kv_block)
            np.testing.assert_array_equal(step.tile.delta, rows_of(found.D, step.q_block))
            np.testing.assert_array_equal(step.tile.lse, rows_of(found.L, step.q_block))
            np.testing.assert_allclose(
                step.tile.dS, step.tile.P * (step.tile.dP - step.tile.delta[:, None]), rtol=1e-5, atol=1e-6
            )
            added = [scale * step.tile.dS @ K, scale * step.tile.dS.T @ Q, step.tile.P.T @ dO]
        for before, more, after in zip(step.before, added, step.after, strict=True):
            np.testing.assert_allclose(before + more, after, rtol=1e-4, atol=1e-5)
        left |= dict(zip(own, step.after, strict=True))


@pytest.mark.parametrize("case", BACKWARD, ids=str)
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


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_the_data_is_json_and_sentences_say_what_the_numbers_are(case: Case) -> None:
    found = walk_backward(case)
    shown = drawn(backward_chart, found, 150_000)
    for n, (step, kept) in enumerate(zip(found.steps, shown, strict=True)):
        said = said_of.phases(found, step)
        assert [list(phase) for phase in said] == kept["phases"]
        text = " ".join(text for _, text in said)
        text += said_of.error(found, step) + walkthrough_words.meter(found, n)
        assert not re.search(r"\bnan\b|\binf\b|  ", text), text
        assert f"{step.moved.read:,} B" in text or not step.moved.read
        written = (int(x.replace(",", "")) for x in re.findall(r"([0-9,]+) B\.", said[-1][1]))
        assert sum(written) == step.moved.written
        if step.tile is not None:
            assert kept["dS"] == step.tile.dS.astype(float).round(4).tolist()
            rows, keys = (np.arange(BLOCK) + BLOCK * n for n in (step.q_block, step.kv_block))
            hidden = int((~MASKS[case.mask].visible(rows, keys, 32, 32)).sum())
            assert (f"hides {hidden} of 64" in said[1][1]) == (hidden > 0)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_fa3s_timeline_keeps_the_kernels_rules(stages: int) -> None:
    events = fa3.pipeline(stages)
    at = {(e.row, e.name, e.tile): e for e in events}
    for row in (*fa3.rows(stages), "products"):  # nothing overlaps in a row, or on the tensor cores
        mine = sorted((e.start, e.end) for e in events if row in (e.row, e.row.partition(": ")[2]))
        assert mine and all(a[1] <= b[0] for a, b in itertools.pairwise(mine)), row
    for n, tile in itertools.product(range(fa3.CONSUMERS), range(fa3.TILES)):
        S, PV = (at[fa3.products(n), name, tile] for name in ("S", "P V"))
        weights = at[fa3.softmax(n), "softmax", tile]
        assert (
            at[fa3.PRODUCER, "K", tile].end <= S.start and S.end <= weights.start and weights.end <= PV.start
        )
        assert at[fa3.PRODUCER, "V", tile].end <= PV.start
        for ring, reader in (("K", S), ("V", PV)):
            held = at[fa3.stage(ring, tile % stages), ring, tile]
            assert held.start < reader.start and reader.end <= held.end
    busy, alone = (fa3.busy(fa3.pipeline(stages, n)) for n in (fa3.CONSUMERS, 1))
    assert busy[0] / busy[1] > alone[0] / alone[1]
    assert all(len(fa3.words(events, stages, time)) == 3 for time in range(busy[1]))


# --- The page ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "link",
    [
        {},
        {"algorithm": "fa1", "mask": "causal", "seed": "7", "step": "11"},
        {"mask": "window"},
        {"algorithm": "decode", "splits": "8", "step": "9"},
        {"algorithm": "decode", "splits": "1", "seed": "12"},
        {"algorithm": ALGORITHM},
        {"algorithm": ALGORITHM, "mask": "causal", "seed": "7", "step": "18"},
        {"algorithm": ALGORITHM, "mask": "window", "step": "2"},
        {"algorithm": "fa3", "stages": "1", "step": "24"},
    ],
    ids=str,
)
def test_a_link_shows_what_it_says(link: dict[str, str]) -> None:
    app = open_page("understand", **link)
    assert parameters(app) == link
    assert ("The backward recomputes P" if ALGORITHM in link.values() else "cufa-verdict") in words(app)
    assert not app.warning


@pytest.mark.parametrize(
    ("former", "step", "then"), [("fa2", "14", ("decode", "9")), (ALGORITHM, "18", ("fa2", "16"))]
)
def test_another_algorithm_keeps_within_its_steps(former: str, step: str, then: tuple[str, str]) -> None:
    app = open_page("understand", algorithm=former, step=step)
    app.segmented_control[0].set_value(then[0]).run()
    assert not app.exception
    assert {"algorithm": "fa2"} | parameters(app) == {"algorithm": then[0], "step": then[1]}


# --- One's own rows, and the derivations ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_derivations_numbers_hold(case: Case) -> None:
    found = walk(case)
    P = weights(found)
    np.testing.assert_allclose(np.nansum(P, axis=1), 1)
    np.testing.assert_allclose(np.nan_to_num(P) @ found.V.astype(float), found.exact, atol=1e-12)
    for n in range(len(found.steps)):
        row = softmax_row.row_of(found, n)
        said = softmax_row.values(row)
        numbers = ((name, x.replace("−", "-")) for name, x in said.items() if re.fullmatch(r"−?[\d.]+", x))
        number = {name: float(x) for name, x in numbers}
        near = {"rel": 0.02, "abs": 0.02}
        for x in "lo":
            after = number["alpha"] * number[f"{x}_before"] + number[f"{x}_added"]
            assert after == pytest.approx(number[f"{x}_after"], **near)
        assert number["o_after"] / number["l_after"] == pytest.approx(number["ended"], **near)
        assert number["largest"] + number["shift"] == pytest.approx(100) and said["overflow"] == "∞"
        last = softmax_row.passes(row)[-1]
        assert last["online: l"] == last["second pass: l"] and last["online: m"] == last["first pass: m"]


def test_ones_own_rows_are_the_first_rows_of_the_walk() -> None:
    rows = own_rows.read("[[1. -2.5\n 3]\n [0, 1e-1]]")
    assert rows == ((1, -2.5, 3), (0, 0.1)) == own_rows.read("1, -2.5 3\n\n0 0.1")
    assert own_rows.read(own_rows.write(rows)) == rows
    for case in (Case("fa2", Q=rows, K=rows), Case("decode", Q=rows), Case(ALGORITHM, Q=rows)):
        found = walk_backward(case) if case.algorithm == ALGORITHM else walk(case)
        np.testing.assert_array_equal(found.Q[:2, :4], np.float16([[1, -2.5, 3, 0], [0, 0.1, 0, 0]]))
        random = walk(Case("fa2")).Q if case.algorithm != "decode" else walk(Case("decode")).Q
        np.testing.assert_array_equal(found.Q[2:], random[2:])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,2\n3,apples", "row 2: 'apples' is not a number"),
        ("nan", "row 1: nan is not from −10 to 10"),
        ("11", "row 1: 11 is not from −10 to 10"),
        ("1 2 3 4 5 6 7 8 9", "row 1 has 9 numbers; a row here has at most 8"),
        ("1\n" * 65, "65 rows; this page has at most 64"),
    ],
)
def test_what_is_no_row_is_told_and_the_page_goes_on(text: str, why: str) -> None:
    app = open_page("understand", own="1", q="1,2")
    app.text_area(key="understand.q").set_value(text).run()
    assert not app.exception and why in app.error[0].value
    assert parameters(app) == {"own": "1", "q": "1,2"}
    assert "1 of 32 rows of Q and 0 of 32 rows of K are yours" in words(app)


def test_the_page_derives_with_its_own_numbers_and_shows_who_shares_keys() -> None:
    app = open_page("understand", step="2", own="1", q="3,0,0,0,0,0,0,1", k="1;2;0.5")
    own = Case("fa2", Q=own_rows.read("3,0,0,0,0,0,0,1"), K=own_rows.read("1;2;0.5"))
    row = softmax_row.row_of(walk(own), 1)
    found, text = softmax_row.values(row), " ".join(words(app).split())
    for said in (
        f"the bold line is the tile of {found['keys']}",
        f"α · {found['l_before']} + {found['l_added']} = {found['l_after']}",
        f"{found['o_after']} ÷ {found['l_after']} = {found['ended']}",
        "448 · exp(s − m)",  # in 8 bits
    ):
        assert said in text
    assert "| 1 (MQA) | 512 B | 8 | 8 | 1 | 256 |" in text and "{" not in text
