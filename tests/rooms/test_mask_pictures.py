"""Pictures of masks: each cell against the matrix."""

from __future__ import annotations

import numpy as np
import pytest

from cufa import masks
from cufa.problem import mask_pictures
from cufa.problem.columns import Chunks
from cufa.problem.mask import FULL, Mask


def test_pictures():
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="Plotly draws the figure")
    for mask in (FULL, masks.window(3, 1), masks.documents([50, 100, 200]), Chunks(9)):
        figure = mask.figure()
        assert isinstance(figure, graph_objects.Figure) and figure.layout.title.text == str(mask)
        page = mask._repr_html_()
        assert page.count("<svg") == 1 and str(mask) in page
    shown = np.array(masks.window(0, 0).figure(5, 5).data[0].z)
    np.testing.assert_array_equal(shown, 2 * np.eye(5))
    assert "350 queries × 350 keys" in masks.documents([50, 100, 200])._repr_html_()


_rng = np.random.default_rng(3)
PICTURED = {
    "full": FULL, "causal": masks.causal("top-left"), "window": masks.window(9, 3),
    "prefix": masks.prefix(np.array([20, 3])), "streaming": masks.streaming(4, 12),
    "global_window": masks.global_window(6, 5, None), "chunks": masks.chunks(13),
    "documents": masks.documents([[20, 7, 183], [210, 0, 0]], causal=False), "evict": masks.evict(np.arange(210) + 9),
    "shared_question": masks.shared_question(30, [90, 40], seqlen=210),
    "columns": masks.columns(*_rng.integers(-5, 130, (4, 2, 3, 210)), window=(90, 4)),
    "from_flashmask": masks.from_flashmask(_rng.integers(0, 130, (1, 3, 210, 2)), causal=True),
    "where": masks.where(lambda b, h, i, j: (i // 8 + j // 8) % 3 > 0, within=masks.window(90, 4)),
    "from_dense": masks.from_dense(_rng.random((1, 210)) > 0.5),
}  # fmt: skip


def test_every_builder_has_its_picture_looked_at():
    assert {*PICTURED} == {*masks.__all__} - {"Mask"}


@pytest.mark.parametrize("name", PICTURED)
@pytest.mark.parametrize("seqlen_q", [1, 50, 130, 300])
def test_pictures_show_the_matrix_and_never_make_it(name, seqlen_q, monkeypatch):
    """In squares, where it is larger than a picture."""
    mask = PICTURED[name]
    dense = mask.dense(seqlen_q, 210, 1, 2)
    monkeypatch.setattr(Mask, "dense", None)
    shown = mask_pictures.cells(mask, seqlen_q, 210, 1, 2)
    step = -(-max(seqlen_q, 210) // 96)
    for (i, j), cell in np.ndenumerate(shown):
        square = dense[i * step : (i + 1) * step, j * step : (j + 1) * step]
        assert cell == int(square.any()) + int(square.all())


def test_a_mask_of_no_keys_has_no_picture():
    nothing = masks.evict(np.zeros(0, int))
    assert "of no keys" in nothing._repr_html_()
    pytest.importorskip("plotly", reason="Plotly draws the figure")
    with pytest.raises(ValueError, match="no keys to draw"):
        nothing.figure()


def test_a_picture_without_plotly(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    with pytest.raises(ImportError, match="pip install plotly"):
        FULL.figure()
