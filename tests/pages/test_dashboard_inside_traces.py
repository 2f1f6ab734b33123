"""Traces from inside a block: of decoding on its page, and of two kernels side by side; the H100 among the cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboard_page_support import has, open_page, words

from cufa.dashboard.views.shape_controls import capability_of, card_key
from cufa.gpu.architectures import Device
from cufa.measure import inside


def test_decode_shows_its_recorded_trace(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page("decode")
    has(words(app), "Inside a block", "warps that multiply wait")
    (choice,) = (x for x in app.selectbox if x.label == "Recorded trace")
    assert all("32,768 cached" in x for x in choice.options)
    assert {x.partition(",")[0] for x in choice.options} >= {"NVIDIA H100 80GB HBM3"}, (
        "each with the card that it is of"
    )
    monkeypatch.setattr(inside, "INSIDE_DIR", shipped / "none")
    has(words(open_page("decode")), "No trace from inside a decoding block is recorded.")


def test_two_kernels_side_by_side(shipped: Path) -> None:
    asked = {
        "sq": "2048", "sk": "2048", "batch": "2", "heads": "32", "d": "128", "alg": "fa3", "two": "1",
        "b_alg": "fa2",
    }  # fmt: skip
    said = words(open_page("masked_work", **asked))
    has(
        said,
        "Inside a block, side by side",
        "exposed softmax",
        "| phase | ",
        "NVIDIA H100 80GB HBM3, 2026-11-26: fa3_forward",
    )
    said = words(open_page("masked_work", **asked, card="90x114"))
    has(said, "unlike the controls above, measured on NVIDIA H100 80GB HBM3", "exposed softmax")
    said = words(open_page("masked_work", **asked | {"b_alg": "fa1"}, card="90x114"))
    has(said, "no trace from inside a block of", "is recorded on another card")


def test_an_h100_can_be_predicted_for() -> None:
    """It has as many SMs as the typical card of its architecture, and a name of its own in links."""
    app = open_page("masked_work", card="90-h100")
    assert not app.warning
    (card,) = (x for x in app.selectbox if x.label == "Card to predict for")
    assert card.value == "90-h100" and "H100 · sm_90 · 132 SMs" in card.options
    real = Device("NVIDIA H100 80GB HBM3", Device.typical(90).arch, 132)
    assert (card_key(real), card_key(Device.typical(90))) == ("90-h100", "90")
    assert [capability_of(x) for x in ("90", "90x114", "90-h100", "100")] == [90, 90, 90, 100]
