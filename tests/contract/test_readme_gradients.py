"""The README's examples of gradients: they run, and what they compute is right. PyTorch and JAX are not needed to run
the tests; where they are not installed their examples are skipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backward_support import Case, assert_gradients
from support import make_inputs

import cufa

README = Path(__file__).parents[2] / "README.md"


def example(number: int) -> dict[str, Any]:
    """What an example of the section defines."""
    section = README.read_text(encoding="utf-8").split("\n## Gradients\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number], names)
    return names


def inputs(dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """dout, q, k and v."""
    q, k, v = make_inputs(2, 4, 2, 70, 90, 32, dtype)
    return make_inputs(2, 4, 2, 70, 90, 32, dtype, seed=1)[0], q, k, v


def check(got: Any, dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    out, lse = cufa.attention_reference(q, k, v, causal=True, return_lse=True)
    case = Case(dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), None, {"causal": True})
    assert_gradients([np.asarray(x) for x in got], case)


def test_arrays(capsys):
    names = example(0)
    check([names[x] for x in ("dq", "dk", "dv")], *(names[x] for x in ("dout", "q", "k", "v")))
    assert "workspace" in capsys.readouterr().out


def test_torch():
    torch = pytest.importorskip("torch")
    attention, arrays = example(1)["Attention"], inputs()
    dout, q, k, v = (torch.from_dlpack(x) for x in arrays)
    for x in (q, k, v):
        x.requires_grad_()
    attention.apply(q, k, v, {"causal": True}).backward(dout)
    check([x.grad.numpy() for x in (q, k, v)], *arrays)
    wide = [x.detach()[:, :2, :5, :8].double().contiguous().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attention.apply(*x, {"causal": True, "softcap": 2.0}), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    attention, arrays = example(1)["Attention"], inputs(dtype)
    dout, *qkv = (torch.from_numpy(x.astype(np.float32)).to("cuda", getattr(torch, dtype)) for x in arrays)
    for x in qkv:
        x.requires_grad_()
    attention.apply(*qkv, {"causal": True}).backward(dout)
    check([x.grad.float().cpu().numpy().astype(arrays[1].dtype) for x in qkv], *arrays)


def test_jax():
    jax = pytest.importorskip("jax")
    attention, arrays = example(2)["attention"], inputs()
    dout, *qkv = (jax.numpy.asarray(x) for x in arrays)
    out, pull_back = jax.vjp(lambda *x: attention(*x, (("causal", True),)), *qkv)
    check(pull_back(dout), *arrays)
    np.testing.assert_allclose(out, cufa.attention_reference(*arrays[1:], causal=True), atol=1e-5)


def test_thinc():
    pytest.importorskip("thinc", reason="needs thinc (extra train)")
    names = example(3)
    model, out = names["model"], names["out"]
    assert out.data.shape == (300, 64)
    again = model.predict(out.__class__(names["tokens"], names["lengths"]))
    assert (again.data**2).mean() < (out.data**2).mean(), "a step of the optimiser"


@pytest.mark.gpu
def test_jax_on_a_gpu():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    attention, arrays = example(2)["attention"], inputs("float16")
    dout, *qkv = (jax.numpy.asarray(x) for x in arrays)
    _, pull_back = jax.vjp(lambda *x: attention(*x, (("causal", True),)), *qkv)
    check(pull_back(dout), *arrays)
