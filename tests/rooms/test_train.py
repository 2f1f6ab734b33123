"""The thinc layer: its gradients against the reference and finite differences, forms of batches, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cufa

pytest.importorskip("thinc", reason="needs thinc (extra train)")
from thinc.api import (
    CupyOps,
    NumpyOps,
    Padded,
    Ragged,
    chain,
    registry,
    set_dropout_rate,
    to_numpy,
    use_ops,
    with_ragged,
    zero_init,
)

import cufa.train.attention as layer_module
from cufa.train import SelfAttention

WEIGHTS = ("Wq", "Wk", "Wv", "Wo")
LENGTHS = np.array([3, 3, 0, 7, 1, 1, 5], np.int32)
RUNS = [(0, 2, 3), (6, 1, 7), (13, 2, 1), (15, 1, 5)]  # first token, sequences, their length
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"causal": True, "softcap": 2.0, "scale": 0.5},
    "mask": {"mask": cufa.masks.window(1, 0, diagonal=1)},
}


def make(nI: int = 12, dtype: str = "float64", ops=None, **options):
    """A layer of known parameters; of float64, with ops that take it."""
    options = {"heads": 4, "kv_heads": 2, "head_dim": 8, **options}
    with use_ops("numpy") if ops is None else use_ops(ops.name):
        layer = SelfAttention(10, nI, **options).initialize()
    layer.ops = ops or NumpyOps(use_blis=dtype == "float32")
    rng = np.random.default_rng(0)
    for name in WEIGHTS:
        layer.set_param(
            name, layer.ops.asarray(rng.standard_normal(layer.get_param(name).shape).astype(dtype) / 2)
        )
    return layer


def samples(width: int, dtype: str = "float64", seed: int = 1) -> np.ndarray:
    """(tokens of LENGTHS, width)"""
    return np.random.default_rng(seed).standard_normal((LENGTHS.sum(), width)).astype(dtype)


def shaped(x: np.ndarray, form: str, ops=None):
    """The tokens as the form that a layer takes."""
    x = x if ops is None else ops.asarray(x)
    return Ragged(x, LENGTHS) if form == "ragged" else x.reshape(2, -1, x.shape[1])


def rows(x) -> np.ndarray:
    data = to_numpy(x.data if isinstance(x, Ragged) else x)
    return data.reshape(-1, data.shape[-1])


def expected(layer, x: np.ndarray, dy: np.ndarray, form: str, seed: tuple[int, int] | None = None, **scores):
    """Y, dX and the gradients of the weights in float64: attention is the reference's, for each run of sequences of one
    length. ``seed``: of dropout, with the number of the first run."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    w = {name: to_numpy(layer.get_param(name)).astype(np.float64) for name in WEIGHTS}
    q, k, v = (x @ w[name].T for name in WEIGHTS[:3])
    dout, out = dy @ w["Wo"], np.empty_like(q)
    dq, dk, dv = (np.empty_like(t) for t in (q, k, v))
    runs = RUNS if form == "ragged" else [(0, 2, len(x) // 2)]
    for number, (start, batch, seqlen) in enumerate(runs):
        part = slice(start, start + batch * seqlen)
        scores |= {} if seed is None else {"seed": np.array([seed[0], seed[1] + number], np.uint64)}

        def heads(t, part=part, batch=batch, seqlen=seqlen):
            return t[part].reshape(batch, seqlen, t.shape[1] // 8, 8)

        inputs = heads(q), heads(k), heads(v)
        out[part] = cufa.attention_reference(*inputs, layout="bshd", **scores).reshape(out[part].shape)
        found = cufa.attention_reference_backward(heads(dout), *inputs, layout="bshd", **scores)
        for into, gradient in zip((dq, dk, dv), found, strict=True):
            into[part] = gradient.reshape(into[part].shape)
    weights = {name: t.T @ x for name, t in zip(WEIGHTS, (dq, dk, dv), strict=False)}
    dx = dq @ w["Wq"] + dk @ w["Wk"] + dv @ w["Wv"]
    return out @ w["Wo"].T, dx, {**weights, "Wo": dy.T @ out}


def check(layer, form: str, tolerance: float, dtype: str, ops=None, **scores) -> None:
    x, dy = samples(12, dtype), samples(10, dtype, seed=2)
    Y, backprop = layer(shaped(x, form, ops), is_train=True)
    dX = backprop(shaped(dy, form, ops))
    of_y, of_x, of_weights = expected(layer, x, dy, form, **scores)
    np.testing.assert_allclose(rows(Y), of_y, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(rows(dX), of_x, atol=tolerance, rtol=tolerance)
    for name, gradient in of_weights.items():
        np.testing.assert_allclose(
            to_numpy(layer.get_grad(name)), gradient, atol=tolerance, rtol=tolerance, err_msg=name
        )
    assert type(Y) is type(dX) and to_numpy(rows(dX)).dtype == dtype
    if form == "ragged":
        assert (to_numpy(Y.lengths) == LENGTHS).all() and (to_numpy(dX.lengths) == LENGTHS).all()


@pytest.mark.parametrize("form", ["floats3d", "ragged"])
@pytest.mark.parametrize("scores", MASKS.values(), ids=MASKS)
def test_gradients_are_the_references(form, scores):
    check(make(**scores), form, 1e-12, "float64", **scores)


@pytest.mark.parametrize("form", ["floats3d", "ragged"])
def test_each_step_drops_other_weights(form):
    """Every run of sequences has a number of its own. Predictions, and a rate of 0, drop nothing."""
    layer, runs = make(dropout=0.4, seed=2**63), len(RUNS) if form == "ragged" else 1
    x = shaped(samples(12), form)
    for step in range(2):
        for name in WEIGHTS if step else ():
            layer.set_grad(name, 0 * layer.get_grad(name))
        check(layer, form, 1e-12, "float64", dropout=0.4, seed=(2**63, step * runs))
    for found in (layer.predict(x), set_dropout_rate(layer, 0.0).begin_update(x)[0]):
        np.testing.assert_allclose(rows(found), expected(layer, rows(x), samples(10), form)[0], atol=1e-12)
    assert "dropout_rate" not in make().attrs


def test_the_count_of_dropout_is_kept_in_bytes_and_apart_in_copies():
    layer, x = make(dtype="float32", dropout=0.5, seed=3), shaped(samples(12, "float32"), "ragged")
    layer.begin_update(x)
    same, copy = make(dtype="float32", dropout=0.1, seed=4).from_bytes(layer.to_bytes()), layer.copy()
    first = layer.begin_update(x)[0].data
    for other in (same, copy):
        np.testing.assert_array_equal(other.begin_update(x)[0].data, first)
    assert (layer.begin_update(x)[0].data != first).any()


@pytest.mark.gpu
def test_replays_of_a_graph_drop_other_weights():
    import cupy

    layer, x = make(dtype="float32", ops=CupyOps(), dropout=0.4, seed=5), samples(12, "float32")
    x = shaped(x, "floats3d", CupyOps())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        layer.begin_update(x)[1](layer.predict(x))
        stream.begin_capture()
        y, backprop = layer.begin_update(x)
        dx = backprop(y)
        graph = stream.end_capture()
        found = []
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            found.append((y.get(), dx.get()))
    for step, (out, gradient) in enumerate(found):
        kept = {"dropout": 0.4, "seed": (5, 1 + step)}
        right = expected(layer, rows(x), out.reshape(-1, 10), "floats3d", **kept)
        np.testing.assert_allclose(rows(out), right[0], atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(rows(gradient), right[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", ["floats3d", "ragged"])
def test_float32(form):
    check(make(dtype="float32", causal=True), form, 2e-4, "float32", causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["floats3d", "ragged"])
@pytest.mark.parametrize("scores", MASKS.values(), ids=MASKS)
def test_on_a_gpu(form, scores):
    check(make(dtype="float32", ops=CupyOps(), **scores), form, 2e-4, "float32", CupyOps(), **scores)


def test_gradients_add_up_until_they_are_used():
    layer, x, dy = make(), shaped(samples(12), "ragged"), shaped(samples(10, seed=2), "ragged")
    layer.begin_update(x)[1](dy)
    once = {name: layer.get_grad(name).copy() for name in WEIGHTS}
    layer.begin_update(x)[1](dy)
    for name in WEIGHTS:
        np.testing.assert_array_equal(layer.get_grad(name), 2 * once[name])


def test_neighbours_of_equal_length_are_one_call(monkeypatch):
    shapes = []

    def spy(q, *rest, **options):
        shapes.append(q.shape)
        assert np.shares_memory(options["out"], options["out"].base), "written in place"
        return cufa.flash_attention(q, *rest, **options)

    monkeypatch.setattr(layer_module, "flash_attention", spy)
    make().predict(shaped(samples(12), "ragged"))
    assert shapes == [(2, 3, 4, 8), (1, 7, 4, 8), (2, 1, 4, 8), (1, 5, 4, 8)]


def test_lists_and_padded_through_thinc():
    """In their order, without a look at the padding."""
    layer = make(causal=False)
    parts = [x for x in np.split(samples(12), np.cumsum(LENGTHS)[:-1]) if len(x)]
    alone = [layer.predict(x[None])[0] for x in parts]
    wrapped = with_ragged(layer)
    padded = layer.ops.list2padded([x.astype(np.float32) for x in parts])
    padded.data[...] = np.where(padded.data == 0, np.nan, padded.data)
    for got in (wrapped.predict(parts), layer.ops.padded2list(wrapped.predict(padded))):
        for x, right in zip(got, alone, strict=True):
            np.testing.assert_allclose(x, right, atol=1e-5)
    assert isinstance(wrapped.predict(padded), Padded)


def test_widths_come_from_the_samples():
    x = np.zeros((2, 5, 24), np.float32)
    layer = SelfAttention(heads=3).initialize(x)
    dims = {name: layer.get_dim(name) for name in layer.dim_names}
    assert dims == {"nI": 24, "nO": 24, "heads": 3, "kv_heads": 3, "head_dim": 8}
    assert layer.get_param("Wk").shape == (24, 24)
    layer = SelfAttention(heads=4, kv_heads=1, head_dim=16, init_W=zero_init).initialize(x, x[..., :10])
    shapes = {name: layer.get_param(name).shape for name in WEIGHTS}
    assert shapes == {"Wq": (64, 24), "Wk": (16, 24), "Wv": (16, 24), "Wo": (10, 64)}
    assert not layer.get_param("Wq").any()
    assert chain(layer, SelfAttention(heads=1, head_dim=8)).initialize(x).predict(x).shape == (2, 5, 10)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12)])
def test_nothing_to_see(shape):
    layer, x = make(dtype="float32"), np.zeros(shape, np.float32)
    Y, backprop = layer.begin_update(x)
    assert Y.shape == (*shape[:2], 10)
    assert backprop(Y).shape == shape
    assert not layer.get_grad("Wq").any()


def test_bytes_and_back():
    layer, x = make(dtype="float32", causal=True), shaped(samples(12, "float32"), "ragged")
    again = SelfAttention(10, 12, heads=4, kv_heads=2, head_dim=8, causal=True).from_bytes(layer.to_bytes())
    np.testing.assert_array_equal(again.predict(x).data, layer.predict(x).data)
    with pytest.raises(ValueError, match="heads"):
        SelfAttention(10, 12, heads=2, head_dim=16).from_bytes(layer.to_bytes())


def test_configuration_knows_the_layer():
    options = {"@layers": "cufa.SelfAttention.v1", "nO": 16, "nI": 16, "heads": 2, "window": [4, 0]}
    layer = registry.resolve({"model": options})["model"].initialize()
    x = np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32)
    moved = x.copy()
    moved[:, 3] += 1
    changed = (layer.predict(x) != layer.predict(moved)).any(axis=(0, 2))
    assert changed.tolist() == [3 <= query <= 7 for query in range(9)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"heads": 0}, ValueError, "heads=0 must be from 1 to"),
        ({"heads": 2.0}, TypeError, "heads must be an integer from 1 up, not 2.0"),
        ({"heads": 4, "kv_heads": 3}, ValueError, "heads=4 is not a multiple of kv_heads=3"),
        ({"heads": 4, "kv_heads": True}, TypeError, "kv_heads must be an integer from 1 up, not True"),
        ({"heads": 4, "head_dim": 12}, ValueError, "head_dim is 12 .*multiple of 8"),
        ({"heads": 4, "window": 3}, TypeError, "window"),
        ({"heads": 4, "mask": np.ones((4, 4))}, TypeError, "mask must be made by cufa.masks"),
        ({"heads": 4, "causal": True, "window": (1, 1)}, ValueError, "window=.*causal=True hides them"),
        ({"heads": 4, "softcap": -1.0}, ValueError, "softcap"),
        ({"heads": 4, "scale": math.inf}, ValueError, "scale"),
        ({"heads": 4, "precision": "half"}, ValueError, "precision='half'"),
        ({"heads": 4, "deterministic": "yes"}, TypeError, "deterministic"),
        ({"heads": 4, "dropout": 1.0}, ValueError, "dropout=1.0 must be from 0 to below 1"),
        ({"heads": 4, "dropout": 0.1}, ValueError, "dropout=0.1 needs seed="),
        ({"heads": 4, "seed": 7}, ValueError, "seed= is given, but dropout is None"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_when_the_layer_is_made(options, error, words):
    with pytest.raises(error, match=words):
        SelfAttention(**options)


def test_wrong_widths_are_refused():
    x = np.zeros((1, 2, 20), np.float32)
    with pytest.raises(ValueError, match="nI=20 is not a multiple of heads=3: pass head_dim"):
        SelfAttention(heads=3).initialize(x)
    with pytest.raises(ValueError, match="head_dim is 10"):
        SelfAttention(heads=2).initialize(x)
    with pytest.raises(ValueError, match="X has width 20, but the layer was made for nI=12"):
        make(dtype="float32").predict(x)


def test_other_forms_are_refused():
    layer = make()
    for x in (np.zeros((3, 12)), [np.zeros((3, 12))], layer.ops.list2padded([np.zeros((3, 12), np.float32)])):
        with pytest.raises(TypeError, match=r"X must be Floats3d .* or Ragged, .*with_ragged"):
            layer.predict(x)
    with pytest.raises(ValueError, match="X has lengths that add up to 5, but 4 tokens"):
        layer.predict(Ragged(np.zeros((4, 12)), np.array([2, 3])))
    with pytest.raises(ValueError, match="X has a sequence of length -1"):
        layer.predict(Ragged(np.zeros((4, 12), np.float32), np.array([5, -1])))
    with pytest.raises(ValueError, match="X has no tokens, so that its width is not known"):
        SelfAttention(heads=2).initialize(Ragged(np.zeros((0, 16), np.float32), np.array([0])))


def test_a_batch_without_tokens():
    """As the last of an epoch may be, once the layer is made."""
    layer, nothing = make(), Ragged(np.zeros((0, 12), np.float32), np.array([0, 0], np.int32))
    out, backprop = layer.begin_update(nothing)
    assert (out.dataXd.shape, backprop(out).dataXd.shape) == ((0, 10), (0, 12))
