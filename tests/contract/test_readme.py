"""The README's examples run, and what they compute is right. The first needs NumPy alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cufa
from cufa.kernels.forward.fa2 import Fa2Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(about: str) -> dict[str, Any]:
    """What the one example that contains ``about`` defines."""
    (code,) = (x for x in BLOCKS if about in x)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_it_is_a_landing_page():
    assert len(README.splitlines()) <= 200
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_first_block_needs_numpy_alone():
    blocked = "import sys\nfor x in ('cupy', 'torch', 'jax', 'streamlit', 'plotly'): sys.modules[x] = None\n"
    ran = subprocess.run(
        [sys.executable, "-c", blocked + BLOCKS[0]], capture_output=True, text=True, cwd=ROOT, check=True
    )
    first, *plan = ran.stdout.splitlines()
    assert f"# {first}\n" in BLOCKS[0]
    assert plan[1].startswith("kernel     fa3_forward")


def test_masks_look_as_they_are_drawn(capsys):
    run("cufa.masks.streaming")
    drawn = capsys.readouterr().out.splitlines()
    assert len(drawn) == 6 and all(f"    {line}\n" in README for line in drawn)


def test_gradients():
    names = run("flash_attention_backward")
    expected = cufa.attention_reference_backward(*(names[x] for x in ("dout", "q", "k", "v")), causal=True)
    for name, exact in zip(("dq", "dk", "dv"), expected, strict=False):
        np.testing.assert_allclose(names[name], exact, atol=1e-8)


def test_torch():
    pytest.importorskip("torch", reason="needs PyTorch")
    names = run("import torch")
    assert all(names[x].grad.shape == (1, 8, 256, 64) for x in "qkv")


def test_jax():
    pytest.importorskip("jax", reason="needs JAX")
    assert run("import jax")["gradient"].shape == (1, 256, 8, 64)


def test_decoding():
    names = run("flash_decode")
    assert names["lengths"].tolist() == [1, 18, 901, 2501]
    # Of n + 1 keys the last is of ones: softmax gives it e^√128 times the weight of a key of zeros.
    weight = np.exp(128**0.5)
    expected = [weight / (weight + n) for n in (0, 17, 900, 2500)]
    out = names["out"].astype(np.float32)
    np.testing.assert_allclose(out, np.broadcast_to(np.reshape(expected, (4, 1, 1, 1)), out.shape), rtol=8e-3)


def test_the_tile_that_is_added_fits_every_build():
    """Heads that share a tile have whole warps of rows, with keys split too: 32 rows are two heads of 16."""
    tile = eval(re.search(r"`(Fa2Config\(.+?\))`", README)[1], {"Fa2Config": Fa2Config})
    assert [(x.packed_heads, x.head_rows) for x in tile.in_splits()] == [(1, 32), (2, 16)]
