"""What a type checker sees of the public calls: keywords, choices and results."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import cufa
from cufa.plan.candidates import algorithms
from cufa.problem import typing as names

ROOT = Path(__file__).parents[2]

#: A program of a user: right, but for the lines marked with what mypy must say of them.
PROGRAM = """
import numpy as np
import cufa
from typing import Any
from typing_extensions import assert_type
from numpy.typing import NDArray

F32 = NDArray[np.float32]
q: F32 = np.ones((1, 2, 8, 16), np.float32)
x: F32 = np.ones((8, 2, 16), np.float32)
cu = np.array([0, 8], np.int32)
Lse = NDArray[np.floating[Any]]
assert_type(cufa.flash_attention(q, q, q, causal=True, layout="bshd", algorithm="fa2"), F32)
out, lse = cufa.flash_attention(q, q, q, softcap=30.0, return_lse=True)
assert_type(out, F32)
assert_type(lse, Lse)
assert_type(cufa.flash_attention_varlen(x, x, x, cu, cu), F32)
assert_type(cufa.flash_decode(q[:, :, :1], q, q, schedule="balanced", return_lse=True)[0], F32)
dq, dk, dv = cufa.flash_attention_backward(q, q, q, q, out, lse, causal=True)
assert_type(dv, F32)
*_, dsink = cufa.flash_attention_varlen_backward(x, x, x, x, x, lse[0], cu, cu, sink=[0.0, 0.0])
assert_type(cufa.flash_attention_backward(q, q, q, q, out, lse, sink=lse[0, :, 0]), tuple[F32, F32, F32, Lse])
print(cufa.plan(q, algorithm="fa3", device="sm_90").num_splits, lse.max())


def of_cupy(q: Any) -> Any:
    out, lse = cufa.flash_attention(q, q, q, return_lse=True)
    return out.get()


cufa.flash_attention(q, q, q, algorithm="fa22")  # call-overload
cufa.flash_attention(q, q, q, attn_mask=None)  # call-overload
cufa.flash_attention(q, q, q, return_lse=True).mean()  # attr-defined
cufa.flash_attention_backward(q, q, q, q, q, lse, algorithm="fa4")  # call-overload
cufa.flash_decode(q, q, q, layout="sbhd")  # call-overload
cufa.flash_attention_backward(q, q, q, q, q, lse, window_size=(3, 0))  # call-overload
a, b, c = cufa.flash_attention_backward(q, q, q, q, out, lse, sink=[0.0, 0.0])  # misc
cufa.plan(q, precision="tf16")  # arg-type
cufa.plan(q, sm_scale=1.0)  # arg-type
"""


@pytest.mark.in_turn
@pytest.mark.slow
def test_a_user_program_is_checked(tmp_path):
    pytest.importorskip("mypy", reason="needs the extra dev")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {
        (int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]"))
        for line in done.stdout.splitlines()
        if "program.py" in line and ": error:" in line
    }
    lines = enumerate(PROGRAM.splitlines(), 1)
    assert found == {(n, line.rsplit("# ", 1)[1]) for n, line in lines if "  # " in line}, done.stdout


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (cufa.flash_attention, names.ScaledOptions),
        (cufa.flash_attention_varlen, names.ScaledPackedOptions),
        (cufa.flash_decode, names.DecodeOptions),
        (cufa.flash_attention_backward, names.BackwardOptions),
        (cufa.flash_attention_varlen_backward, names.PackedBackwardOptions),
    ],
)
def test_overloads_have_the_keywords_of_the_signature(call, options):
    keywords = {
        name: x.annotation
        for name, x in inspect.signature(call).parameters.items()
        if x.kind is x.KEYWORD_ONLY
    }
    assert keywords.pop("return_lse", "") == "bool" or keywords.pop("sink") == "Any"
    texts = {
        name: x.__forward_arg__ for base in options.__mro__[:1] for name, x in base.__annotations__.items()
    }
    assert texts == keywords


def test_choices_are_those_of_the_registry():
    for operation, choices in (
        ("forward", names.Algorithm),
        ("decode", names.DecodeSchedule),
    ):
        assert typing.get_args(choices) == algorithms(operation)
