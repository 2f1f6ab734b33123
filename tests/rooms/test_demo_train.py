"""`cufa demo train`: losses are those of attention in float64, and what it prints."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import why_no_gpu

import cufa
from cufa.cli import main
from cufa.commands import demo_train

pytest.importorskip("thinc", reason="needs thinc (extra train)")
from thinc.api import use_ops

import cufa.train.attention as layer_module
from cufa.problem.checks import install
from cufa.train.characters import CharacterModel, num_parameters

# --- cufa demo train ----------------------------------------------------------------------------------------


def attend_in_float64(q, k, v, *, out, return_lse, device, precision, **scores):
    found, lse = cufa.attention_reference(q, k, v, return_lse=True, **scores)
    out[...] = found
    return out, lse


def go_back_in_float64(dout, q, k, v, out, lse, *, dq, dk, dv, deterministic, device, precision, **scores):
    found = cufa.attention_reference_backward(dout, q, k, v, **scores)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into[...] = gradient


def lose_dk(*arrays, dk, **options):
    go_back_in_float64(*arrays, dk=dk, **options)
    dk[...] = 0


def losses(model: CharacterModel, steps: int, ops: str = "numpy") -> np.ndarray:
    np.random.seed(5)  # noqa: NPY002 - thinc's initialisers draw from it
    with use_ops(ops):
        return np.array(list(model.train(model.build(), steps, seed=5)))


SMALL = CharacterModel(width=32, heads=4, kv_heads=2, context=40, batch=4)


def test_losses_are_those_of_float64_attention(monkeypatch):
    found = losses(SMALL, 25)
    monkeypatch.setattr(layer_module, "flash_attention", attend_in_float64)
    monkeypatch.setattr(layer_module, "flash_attention_backward", go_back_in_float64)
    exact = losses(SMALL, 25)
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    assert found[0] == pytest.approx(math.log(65), rel=1e-6), (
        "before it learns all letters are equally likely"
    )
    assert exact[-1] < exact[0] - 0.5
    monkeypatch.setattr(layer_module, "flash_attention_backward", lose_dk)
    assert np.abs(losses(SMALL, 25) / exact - 1).max() > 1e-4, "one that is wrong is seen in the losses"


@pytest.mark.gpu
def test_losses_on_a_gpu_are_those_of_float64_attention(monkeypatch):
    found = losses(SMALL, 25, "cupy")
    monkeypatch.setattr(layer_module, "flash_attention", attend_in_float64)
    monkeypatch.setattr(layer_module, "flash_attention_backward", go_back_in_float64)
    np.testing.assert_allclose(found, losses(SMALL, 25), rtol=5e-5)


def test_gradients_of_the_whole_model(monkeypatch):
    """Along the gradient itself the loss changes by its squared norm."""
    np.random.seed(6)  # noqa: NPY002
    with use_ops("numpy"):
        network = SMALL.build()
    letters = SMALL.numbers(SMALL.text[:164]).reshape(4, 41)
    list(SMALL.train(network, 3, seed=0))  # the last layer starts at zero and would let no gradient through
    SMALL.gradients(network, letters)
    nodes = [(node, name) for node in network.walk() for name in node.param_names]
    gradients = [node.get_grad(name).astype(np.float64) for node, name in nodes]
    at = [node.get_param(name).copy() for node, name in nodes]
    norm = math.sqrt(sum((g**2).sum() for g in gradients))

    def loss(step: float) -> float:
        for (node, name), value, g in zip(nodes, at, gradients, strict=True):
            node.set_param(name, (value + step / norm * g).astype(np.float32))
        return SMALL.gradients(network, letters)

    assert (loss(0.02) - loss(-0.02)) / 0.04 == pytest.approx(norm, rel=0.02)


def test_the_text():
    model = CharacterModel()
    assert 50_000 < len(model.text) < 100_000 and len(model.letters) == 65
    assert model.text.startswith("CHAPTER I. Down the Rabbit-Hole\n\nAlice was")
    assert "".join(model.letters[n] for n in model.numbers(model.text)) == model.text
    assert not {"Gutenberg", "\r", "  "} & set(model.text)


def run(*arguments: str):
    return CliRunner().invoke(main, ["demo", "train", "--device", "cpu", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_demo_train_in_json(monkeypatch):
    monkeypatch.setattr(demo_train, "_SAMPLE", 40)  # letters, of 400 that take longer than the steps
    documents = [json.loads(run("--steps", "3", "--seed", seed, "--json").stdout) for seed in "112"]
    one = documents[0]
    assert one["steps"] == len(one["losses"]) == 3 and one["device"] == "CPU"
    assert one["losses"][0] > one["losses"][2]
    assert one["losses"] == documents[1]["losses"] != documents[2]["losses"]
    assert one["sample"] == documents[1]["sample"] and one["sample"].startswith("Alice ")
    with use_ops("numpy"):
        assert one["model"]["parameters"] == num_parameters(CharacterModel().build()) == 103_873
    assert one["seconds"] > 0 and one["cpu_seconds"] > 0


def test_demo_train_prints_losses_and_a_text(monkeypatch):
    monkeypatch.setattr(demo_train, "_SAMPLE", 40)
    result = run("--steps", "4")
    assert result.exit_code == 0, result.output
    for words in (
        "103,873 parameters",
        "83,465 letters",
        "4.174",
        "per step",
        "The model makes up:\n\nAlice ",
    ):
        assert words in result.stdout


@pytest.mark.in_turn
def test_demo_train_fails_when_it_diverges(monkeypatch):
    monkeypatch.setattr(CharacterModel, "train", lambda self, network, steps, seed: iter([4.0, math.nan]))
    result = run("--steps", "2")
    assert result.exit_code == 1
    assert "not finite" in result.stderr


def test_demo_train_without_thinc(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("thinc", "cufa.train"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cufa, "train")
    monkeypatch.setitem(sys.modules, "thinc.api", None)
    result = run()
    assert result.exit_code == 3 and result.stdout == ""
    assert install("train") in " ".join(result.stderr.split())


def test_options_before_the_name_are_refused():
    result = CliRunner().invoke(main, ["demo", "--json", "train"])
    assert result.exit_code == 2
    assert "options go behind the name: cufa demo train" in result.stderr


@pytest.mark.skipif(why_no_gpu() is not None, reason="says what happens on a GPU without cuBLAS")
@pytest.mark.gpu
def test_demo_train_without_cublas(monkeypatch):
    import thinc.util

    monkeypatch.setattr(thinc.util, "has_cupy_gpu", False)
    command = ["demo", "train", "--steps", "2"]
    result = CliRunner().invoke(main, [*command, "--device", "cuda"])
    assert result.exit_code == 3
    assert "thinc needs cuBLAS" in " ".join(result.stderr.split())
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["device"] == "CPU"


@pytest.mark.gpu
def test_demo_train_on_a_gpu():
    result = CliRunner().invoke(main, ["demo", "train", "--steps", "60", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["device"] != "CPU"
    assert document["losses"][-1] < document["losses"][0] - 1
