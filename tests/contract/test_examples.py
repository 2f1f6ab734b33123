"""The programs of ``cufa/examples`` run and end with what they show."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cufa.examples

HELD: dict[str, Callable[[Any], bool]] = {
    "naive": lambda result: result is None,
    "mask_gallery": lambda result: result is None,
    "decoding_loop": lambda lengths: lengths.tolist() == [13, 38],
    "merging_parts": lambda difference: difference < 1e-5,
    "own_tile": lambda findings: findings == 0,
    **{
        f"training_{x}": lambda losses: losses[1] < 0.7 * losses[0]
        for x in ("numpy", "torch", "jax", "thinc")
    },
}


def test_every_example_is_listed():
    files = Path(cufa.examples.__file__).parent.glob("[a-z]*.py")
    assert {path.stem for path in files} == HELD.keys() and len(HELD) <= 10


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.emulate) if x == "own_tile" else x for x in HELD]
)
def test_it_runs(name, capsys):
    if "_" in name and name.split("_")[1] in ("torch", "jax", "thinc"):
        pytest.importorskip(name.split("_")[1], reason=f"needs {name.split('_')[1]}")
    main = importlib.import_module(f"cufa.examples.{name}").main
    assert HELD[name](main(256) if name == "naive" else main())
    assert capsys.readouterr().out
