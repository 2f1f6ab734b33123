"""The kernel that makes masks of texts, on the CPU executor: the same numbers as from the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cufa import masks
from cufa.executor import build
from cufa.executor.launch import Execution, execute
from cufa.executor.memory import GlobalArray
from cufa.kernels import Launch

PARAMETERS = ("Lengths", "Runs", "i64", "i64", "i64", "i64")
FORMS = ("causal", "both ways", "question")  # in the order of the kernel's TextForm
RNG = np.random.default_rng(0)
LENGTHS = [
    np.array([[50]]),
    np.array([[10, 0, 40]]),
    np.array([[0, 0, 7, 0]]),
    np.zeros((2, 3)),
    np.array([[10, 20, 20], [30, 5, 0]]),
    RNG.integers(0, 9, (3, 70)),
    RNG.integers(0, 3, (1, 200)),
    np.ones((1, 100)),
    np.zeros((1, 0)),
]


def run(lengths: np.ndarray, keys: int, form: str) -> np.ndarray:
    entry = build.kernel("kernels/text_runs.cu", {}, ["text_runs"], True, PARAMETERS)["text_runs"]
    (sequences, texts), form_number = lengths.shape, FORMS.index(form)
    runs = np.full((4 if form == "both ways" else 2, sequences, 1, keys), 77, np.int32)
    numbers = map(ctypes.c_int64, (sequences, texts, keys, form_number))
    arguments = [ctypes.c_void_p(lengths.ctypes.data), ctypes.c_void_p(runs.ctypes.data), *numbers]
    launch = Launch("text_runs", (-(-sequences * -(-keys // 32) // 4), 1, 1), 128, 0)
    memory = [GlobalArray("lengths", lengths, False), GlobalArray("runs", runs, True)]
    _, findings = execute(entry, launch, arguments, memory, Execution("checked"))
    assert not findings
    return runs


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{x.shape[0]}x{x.shape[1]}")
@pytest.mark.parametrize("form", FORMS)
def test_runs_of_texts_are_those_from_the_host(form, lengths):
    lengths = lengths.astype(np.int32)
    seqlen = max(int(lengths.sum(axis=1).max()), 1) + 37  # the last keys are in no text
    if form == "question":
        if lengths.shape[1] == 0:
            lengths = np.zeros((1, 1), np.int32)
        mask = masks.shared_question(lengths[:, 0], lengths[:, 1:], seqlen=seqlen)
    else:
        mask = masks.documents(lengths, causal=form == "causal", seqlen=seqlen)
    np.testing.assert_array_equal(run(lengths, seqlen, form), mask.intervals.values)
