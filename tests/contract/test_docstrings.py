"""Docstrings of public calls name every argument, and their examples run on the arrays that they name."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import cufa
from cufa.calls import backward, decode, forward, merge, quantize, varlen
from cufa.masks import bands, by_key

pytestmark = pytest.mark.usefixtures("on_cpu")


def _arrays(axes: int) -> dict[str, np.ndarray]:
    """(batch, heads, seqlen, head_dim), or packed: 12 queries and 16 keys, (tokens, heads, head_dim)."""
    q, k = ((12, 4, 16), (16, 2, 16)) if axes == 3 else ((1, 4, 1, 16), (1, 2, 1, 16))
    names = ("k", "v", "prefix_k", "prefix_v", "k_cache", "v_cache")
    return {name: np.ones(q, np.float32) for name in ("q", "dout")} | {
        name: np.ones(k, np.float32) for name in names
    }


@pytest.mark.parametrize(
    "module", [forward, backward, varlen, decode, merge, quantize, bands, by_key, cufa.masks]
)
def test_examples_of_docstrings(module):
    names = {"cufa": cufa, "np": np} | _arrays(3 if module is varlen else 4)
    found = [x for x in doctest.DocTestFinder(recurse=True).find(module, globs=names) if x.examples]
    assert found
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    for test in found:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


@pytest.mark.parametrize(
    "function",
    [
        cufa.flash_attention, cufa.flash_attention_backward, cufa.flash_attention_varlen, cufa.flash_decode,
        cufa.merge_attention_states, cufa.quantize,
    ],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_every_argument_is_documented(function):
    lines = (inspect.getdoc(function) or "").splitlines()
    said = {name for line in lines for name in line.split(" : ")[0].replace(",", " ").split()}
    assert inspect.signature(function).parameters.keys() - {"unknown"} <= said
