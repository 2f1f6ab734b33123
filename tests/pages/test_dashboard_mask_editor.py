"""The mask editor of Masked work: texts, links and the page under AppTest."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_page_support import alts, has, open_page, parameters, words
from dashboard_support import DEVICE, write_evidence
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sampling import of_today
from streamlit.testing.v1 import AppTest

from cufa import masks
from cufa.dashboard import sentences
from cufa.dashboard.model import mask_settings, mask_texts, subject
from cufa.dashboard.model.mask_texts import Hidden
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.views import links, mask_editor
from cufa.measure.cases import of_forward
from cufa.measure.mask_cases import DOCUMENTS, irregular_masks
from cufa.measure.suites import SUITES, make
from cufa.plan.planner import make_plan
from cufa.problem.mask import Mask

KINDS = ("prefix", "streaming", "global_window", "documents", "chunks", "shared_question", "evict", "columns")


class TestTexts:
    @given(st.lists(st.integers(0, 9999), max_size=40))
    def test_lengths_are_read_as_they_are_written(self, lengths: list[int]) -> None:
        assert mask_texts.read_lengths(mask_texts.write_lengths(lengths)) == tuple(lengths)

    @pytest.mark.parametrize(
        ("text", "lengths"),
        [
            ("", ()),
            ("7", (7,)),
            ("700, 1500\n300;2\t9", (700, 1500, 300, 2, 9)),
            ("3x5 2 × 7, 1*0", (5, 5, 5, 7, 7, 0)),
            (" ,,4,, ", (4,)),
            ("[700, 3x5]\n(9)", (700, 5, 5, 5, 9)),
        ],
    )
    def test_lengths_are_read_however_they_are_pasted(self, text: str, lengths: tuple[int, ...]) -> None:
        assert mask_texts.read_lengths(text) == lengths

    @pytest.mark.parametrize(
        "text", ["a", "1.5", "-3", "3x", "x3", "1e3", "9999999", "131073x1", "٣", "1__2"]
    )
    def test_what_is_no_length_is_named(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"not a whole number|too large"):
            mask_texts.read_lengths(f"5,{text},6")

    def test_lengths_are_cut_where_there_is_no_more_room(self) -> None:
        assert mask_texts.fit((5, 0, 7, 9), 8) == (5, 0, 3)
        assert mask_texts.fit((5, 7), 12) == (5, 7)
        assert mask_texts.fit((), 3) == ()

    @given(st.integers(0, 5000))
    def test_shares_fill_the_room(self, room: int) -> None:
        assert sum(mask_texts.shared_out(room, (7, 15, 3))) == room

    @given(
        st.lists(
            st.builds(
                lambda first, more, lo, rows: Hidden(
                    first, first + more, lo, None if rows is None else (lo or 0) + rows
                ),
                st.integers(0, 60), st.integers(0, 20), st.none() | st.integers(0, 40), st.none() | st.integers(0, 30),
            ),
            max_size=2,
        )
    )  # fmt: skip
    def test_hidden_rows_are_read_as_they_are_written_and_mean_that(self, hidden: list[Hidden]) -> None:
        assert mask_texts.read_hidden(mask_texts.write_hidden(hidden)) == tuple(hidden)
        seen = masks.columns(*mask_texts.runs_of(hidden, 50)).dense(40, 50)
        row, key = np.arange(40)[:, None], np.arange(50)[None, :]
        expected = np.ones((40, 50), bool)
        for h in hidden:
            rows = (row >= (h.lo or 0)) & (row <= (1000 if h.hi is None else h.hi))
            expected &= ~((key >= h.first) & (key <= h.last) & rows)
        np.testing.assert_array_equal(seen, expected)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("5", "not of the form"), ("a:1-2", "not of the form"), ("5:3", "not of the form"),
            ("5-3:1-2", "ends before"), ("5:3-2", "ends before"),
            ("0-9:1-2,5:4-5,3-6:7-8", "key 5 is hidden from three"),
            ("[1,2] [3]", "lists of 2 and 1 numbers"), ("[1,2]", "lists of 2 numbers"), ("[1] [x]", "a whole number"),
        ],
    )  # fmt: skip
    def test_what_hides_nothing_that_can_be_is_named(self, text: str, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            mask_texts.read_hidden(text)


@given(st.lists(st.tuples(*[st.integers(0, 60)] * 4), min_size=1, max_size=50), st.booleans())
def test_pasted_vectors_mean_what_the_builder_means(numbers: list[tuple[int, ...]], twice: bool) -> None:
    vectors = [np.array(x) for x in zip(*numbers, strict=True)][: 4 if twice else 2]
    hidden = mask_texts.read_hidden("\n".join(str(x.tolist()) for x in vectors))
    again = mask_texts.read_hidden(mask_texts.write_hidden(hidden))
    found = masks.columns(*mask_texts.runs_of(again, len(numbers))).dense(55, len(numbers))
    np.testing.assert_array_equal(found, masks.columns(*vectors).dense(55, len(numbers)))


MASKS = {
    **irregular_masks(8192),
    "documents": masks.documents(DOCUMENTS),
    "documents, not causal": masks.documents(DOCUMENTS, causal=False),
    "some of it": masks.documents([100, 0, 7, 300], seqlen=8192),
    "top-left": masks.documents(DOCUMENTS, diagonal="top-left"),
    "streaming": masks.streaming(4, 1000, diagonal=17),
    "global": masks.global_window(64, None, 12),
    "chunks": masks.chunks(512),
    "two runs": masks.columns(*mask_texts.runs_of(mask_texts.read_hidden("5-99:7-20,50:30-,9000:1-"), 8192)),
}
del MASKS["random eviction"], MASKS["window of 1024"], MASKS["half of all scores"]


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Mask]:
    """The masks that pages have shown, the last one at the end."""
    found: list[Mask] = []
    choose = mask_editor.choose

    def noted(*args: Any, **options: Any) -> tuple[Mask, float | None]:
        mask, softcap = choose(*args, **options)
        found.append(mask)
        return mask, softcap

    monkeypatch.setattr(mask_editor, "choose", noted)
    return found


def pixels(app: AppTest, at: int = 0) -> np.ndarray:
    """A picture of a mask on the page; 0: of the chosen mask."""
    source = re.findall(r'data:image/png;base64,([^"]*)"', words(app))[at]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source))).convert("RGB"))


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize("name", MASKS)
def test_a_link_leads_to_the_same_mask(name: str, shown: list[Mask]) -> None:
    """The tiles equal the tiles of the mask; columns may get a more specific name."""
    problem = make(2, 4, 8192, 128, "bfloat16", MASKS[name], kv_heads=2)
    found = links.link("masked_work", Subject(problem))
    app = open_page("masked_work", **found)
    assert not app.warning and not app.error
    if found["mask"] != "columns":
        assert shown[-1] == problem.mask
    (grid,) = (alt for alt in alts(app) if "Grid of" in alt)
    assert f" and {make_plan(problem, DEVICE, 'fa2').schedule.skipped:,} skipped tiles" in grid
    # The page's own link gives the same mask.
    before = shown[-1]
    open_page("masked_work", **parameters(app))
    assert shown[-1] == before


def test_a_mask_that_no_link_holds_says_so() -> None:
    for mask in (irregular_masks(8192)["random eviction"], masks.prefix(np.array([3, 4]))):
        problem = make(2, 4, 8192, 128, "bfloat16", mask, kv_heads=2)
        with pytest.raises(ValueError, match=r"more numbers|cannot be set"):
            links.link("masked_work", Subject(problem))
    by_head = masks.evict(np.arange(2 * 64).reshape(1, 2, 64))
    with pytest.raises(ValueError, match="different numbers per sequence"):
        mask_settings.settings(make(1, 2, 64, 16, "bfloat16", by_head))


@pytest.mark.sampled(fixed=3, dated=1)
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_from_both_sides(kind: str, op: str) -> None:
    app = open_page("masked_work", mask=kind, op=op, sq="1000", sk="1200")
    assert not app.warning and not app.error
    said = words(app)
    assert not re.search(r"#[0-9a-f]{6}\b", said + "".join(alts(app)))  # digests of numbers
    assert sentences.sections("masks.md")[kind][1] in said
    assert "tiles are computed" in said and "the visited tiles compute" in said
    told = "\n".join(alts(app))
    has(told, "Predicted timeline", "A key block visits" if op == "backward" else "A query block visits")


def test_a_kind_is_chosen_and_its_numbers_are_typed_and_dragged(shown: list[Mask]) -> None:
    app = open_page("masked_work")
    app.segmented_control(key="masked.mask").set_value("prefix").run()
    assert parameters(app)["mask"] == "prefix" and "length" not in parameters(app)
    app.number_input(key="masked.length").set_value(1000).run()
    assert parameters(app)["length"] == "1000"
    assert app.slider(key="masked.drag.length").value == 1000
    app.slider(key="masked.drag.length").set_value(2048).run()
    assert parameters(app)["length"] == "2048"
    assert app.number_input(key="masked.length").value == 2048
    assert shown[-1] == masks.prefix(2048)


@pytest.mark.sampled(fixed=2, dated=2)
@pytest.mark.parametrize("kind", mask_editor._EXAMPLES)
def test_the_picture_of_a_kind_is_its_mask(kind: str) -> None:
    found = pixels(open_page("masked_work", mask="full"), 1 + list(mask_editor._EXAMPLES).index(kind))
    cells = found[1::4, 1::4]  # a pixel of each cell
    seen = mask_editor._EXAMPLES[kind].dense(24, 24)
    assert cells.shape == (24, 24, 3) and (cells[seen] == cells[seen][0]).all()
    if not seen.all():
        assert not (cells[~seen] == cells[seen][0]).all(axis=1).any()


def test_lengths_are_pasted_and_the_link_says_them_shortly(shown: list[Mask]) -> None:
    app = open_page("masked_work", mask="documents", sq="2048", sk="2048")
    app.text_area(key="masked.lengths").set_value("128\n128\n128\n1000 24").run()
    assert parameters(app)["lengths"] == "3x128,1000,24"
    assert "5 documents of 24 to 1,000 tokens. The last 640 keys belong to no document" in words(app)
    assert shown[-1] == masks.documents([128, 128, 128, 1000, 24], seqlen=2048)


def test_what_cannot_be_read_is_told_and_the_page_goes_on(shown: list[Mask]) -> None:
    app = open_page("masked_work", mask="documents", lengths="1000,3096")
    before, picture = shown[-1], pixels(app)
    app.text_area(key="masked.lengths").set_value("1000, 12 apples").run()
    assert not app.exception
    assert "'apples' is not a whole number" in app.error[0].value
    assert app.text_area(key="masked.lengths").value == "1000, 12 apples"
    assert shown[-1] == before and parameters(app)["lengths"] == "1000,3096"
    app.text_area(key="masked.lengths").set_value("1000, 12").run()
    assert not app.error and shown[-1] != before and not np.array_equal(pixels(app), picture)


def test_more_tokens_than_keys_are_left_out_or_made_room_for(shown: list[Mask]) -> None:
    app = open_page("masked_work", mask="documents", lengths="3000,3000", sq="4096", sk="4096")
    assert "add up to 6,000, but there is room for 4,096" in words(app)
    assert shown[-1] == masks.documents([3000, 1096])
    app.button(key="masked.fit").click().run()
    assert (parameters(app)["sq"], parameters(app)["sk"]) == ("6000", "6000")
    assert shown[-1] == masks.documents([3000, 3000])


def test_odd_numbers_draw_something() -> None:
    """No visible key, one key, more numbers than keys."""
    links = (
        {"mask": "documents", "lengths": "0"}, {"mask": "documents", "lengths": "5", "sq": "1", "sk": "1"},
        {"mask": "columns", "hidden": "0-131071:-", "causal": "0"}, {"mask": "columns", "sq": "1", "sk": "1"},
        {"mask": "shared_question", "question": "999999"}, {"mask": "evict", "least": "9", "most": "3"},
        {"mask": "evict", "rows": "7000x1"}, {"mask": "prefix", "length": "1000000", "sk": "100"},
    )  # fmt: skip
    for link in of_today(links, "odd numbers", fixed=1, dated=2):
        assert "cufa-verdict" in words(open_page("masked_work", **link))


def test_a_kernel_that_does_not_serve_the_mask_says_so_and_is_not_run() -> None:
    link = {"mask": "documents", "sq": "300", "sk": "300", "d": "64"}
    app = open_page("masked_work", alg="fa1", **link)
    assert "No kernel runs this problem: fa1_forward" in words(app)
    assert any(x.proto.disabled for x in app.get("page_link"))
    beside = open_page("masked_work", mask="documents", alg="fa2", two="1", b_alg="fa1")
    assert words(beside).count("No kernel runs this problem: fa1_forward") == 1
    assert app.button(key="masked.emulate").disabled
    served = open_page("masked_work", alg="fa2", **link)
    assert "No kernel runs this" not in words(served)
    assert not served.button(key="masked.emulate").disabled


def test_another_mask_beside_it_begins_with_the_same(shown: list[Mask]) -> None:
    app = open_page("masked_work", mask="documents", lengths="1000,3096", two="1")
    assert shown[-1] == shown[-2]
    assert app.segmented_control(key="masked.b_mask").value == "documents"
    assert app.text_area(key="masked.b_lengths").value == "1000,3096"
    app.text_area(key="masked.b_lengths").set_value("4096").run()
    link = parameters(app)
    assert (link["lengths"], link["b_lengths"]) == ("1000,3096", "4096")
    app.segmented_control(key="masked.b_mask").set_value("evict").run()
    assert not app.exception and "the arithmetic of" in words(app)
    app.text_area(key="masked.lengths").set_value("apples").run()
    assert "'apples'" in app.error[0].value


@pytest.mark.parametrize("name", MASKS)
def test_a_word_of_a_link_is_the_mask(name: str) -> None:
    """Columns may get a more specific name; the visible scores are equal."""
    problem = make(2, 4, 8192, 128, "bfloat16", MASKS[name], kv_heads=2)
    again = subject.problem_of(subject.problem_key(problem))
    assert subject.problem_key(again) == subject.problem_key(problem)
    rows, keys = np.arange(0, 8192, 61), np.arange(8192)
    seen = (p.mask.visible(rows, keys, 8192, 8192) for p in (problem, again))
    np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_documents_whatever_their_diagonal(causal: bool) -> None:
    mask = masks.documents([30, 34], causal, diagonal=3)
    found = mask_settings.settings(make(1, 2, 64, 16, "bfloat16", mask))
    assert found == {"mask": "documents", "lengths": "30,34", "causal": int(causal), "diag": "at", "at": 3}


@pytest.mark.parametrize(
    "text",
    ["prefix", "prefix.1", "prefix.x.top-left", "prefix.1.2.top-left", "chunks.0.top-left", "documents.9.2.top-left",
     "documents.99999.1.top-left", "columns.5-3:1-2.1.top-left", "prefix.1.here.5"],
)  # fmt: skip
def test_a_word_that_is_no_mask_is_told(text: str) -> None:
    word = f"forward__1__1__1__64__64__64__bfloat16.native__{text}__none"
    with pytest.raises(ValueError):
        subject.problem_of(word)


@pytest.mark.sampled(fixed=1, dated=2)
@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("roofline", {"suite": "masks"}), ("compare", {}), ("history", {}), ("masked_work", {}), ("occupancy", {}),
        ("machine_code", {}), ("run", {"preset": "suite-masks"}),
    ],
)  # fmt: skip
def test_pages_show_evidence_of_such_masks_and_of_packed_sequences(
    page: str, link: dict[str, str], elsewhere: Path
) -> None:
    write_evidence(elsewhere / "records", "masks", "forward")
    app = open_page(page, **link)
    assert not app.error and not app.warning


def test_a_recorded_time_of_such_a_mask_stands_beside_the_predicted_one(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records", "masks")
    file.write_text(file.read_text().replace("Made-up GPU", "NVIDIA H200"))
    shape = {"batch": "2", "heads": "32", "kv": "8", "sq": "8192", "sk": "8192"}
    problem = make(2, 32, 8192, 128, "bfloat16", masks.documents(DOCUMENTS), kv_heads=8)
    for operation in ("forward", "backward"):
        mask = mask_settings.settings(problem if operation == "forward" else of_forward(problem))
        assert (mask["mask"], mask["lengths"]) == ("documents", ",".join(map(str, DOCUMENTS)))
        app = open_page("masked_work", op=operation, mask="documents", lengths=mask["lengths"], **shape)
        (table,) = app.dataframe
        assert list(table.value["tiles"])
        times = table.value["recorded"]
        assert (times != "–").sum() == 1, operation


def test_packed_sequences_lead_nowhere() -> None:
    (case, *_) = (c for c in SUITES["masks"].cases(DEVICE) if "documents" in c.name)
    (packed, *_) = (c.problem for c in case.contenders if c.problem is not None)
    for page in links.pages_of(Subject(packed)):
        with pytest.raises(ValueError, match="Packed sequences"):
            links.link(page, Subject(packed, "fa2_forward"))
