"""The kernel that makes masks of texts, on the CPU executor: the same numbers as from the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cufa import masks
from cufa.kernels import Launch
from cufa.masks import streams
from cufa.problem import checks
from cufa.run.emulate import build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

PARAMETERS = ("Lengths", "Runs", "i64", "i64", "i64", "i64")
FORMS = ("causal", "both ways", "question")  # in the order of the kernel's TextForm
RNG = np.random.default_rng(0)
LENGTHS = [
    np.array([[50]]), np.array([[10, 0, 40]]), np.array([[0, 0, 7, 0]]), np.zeros((2, 3)),
    np.array([[10, 20, 20], [30, 5, 0]]), RNG.integers(0, 9, (3, 70)), RNG.integers(0, 3, (1, 200)),
    np.ones((1, 100)), np.array([[300, 5, 0, 700, 256], [1, 2, 3, 4, 5]]), np.zeros((1, 0)),
]  # fmt: skip


def run(lengths: np.ndarray, keys: int, form: str) -> np.ndarray:
    entry = build.kernel("shared/text_runs.cu", {}, ["text_runs"], True, PARAMETERS)["text_runs"]
    (sequences, texts), form_number = lengths.shape, FORMS.index(form)
    runs = np.full((4 if form == "both ways" else 2, sequences, 1, keys), 77, np.int32)
    numbers = map(ctypes.c_int64, (sequences, texts, keys, form_number))
    arguments = [ctypes.c_void_p(lengths.ctypes.data), ctypes.c_void_p(runs.ctypes.data), *numbers]
    launch = Launch("text_runs", (-(-sequences * -(-keys // 256) // 4), 1, 1), 128, 0)
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


class OnGpu:
    """What is looked at of an array on a GPU."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(np.int32)


@pytest.fixture
def asked(monkeypatch):
    """What the kernel is asked for, without a GPU."""
    found = []

    def text_runs(lengths, seqlen, form):
        found.append((lengths, seqlen, form))
        return OnGpu(4 if form == "both ways" else 2, 1, 1, seqlen)

    for module in (streams, checks):
        monkeypatch.setattr(module, "is_device_array", lambda x: isinstance(x, OnGpu))
    monkeypatch.setattr(streams, "_text_runs", lambda: text_runs)
    monkeypatch.setattr(streams, "_checked", {})
    return found


def test_the_same_mask_of_other_lengths_is_checked_once(asked, monkeypatch):
    first, second = OnGpu(3), OnGpu(3)
    one = masks.documents(first, seqlen=50)
    monkeypatch.setattr(streams, "_documents", None)
    other = masks.documents(second, seqlen=50)
    assert asked == [(first, 50, "causal"), (second, 50, "causal")]
    assert (one.band, one.title, one.rows) == (other.band, other.title, other.rows)
    assert one.intervals.array is not other.intervals.array


def test_another_question_is_another_mask(asked):
    questions = [
        {}, {"causal": False}, {"diagonal": "top-left"}, {"diagonal": 3}, {"causal": np.False_},
        {"causal": 1},
    ]  # fmt: skip
    for _ in range(2):
        for question in questions:
            of_host = masks.documents([10, 20], seqlen=50, **question)
            found = masks.documents(OnGpu(2), seqlen=50, **question)
            assert (found.band, found.rows, found.title) == (of_host.band, of_host.rows, of_host.title)
    forms = ["causal", "both ways", "causal", "causal", "both ways", "causal"]
    assert [form for *_, form in asked] == forms * 2
    assert masks.documents(OnGpu(4), seqlen=np.int64(7)).title == "causal documents (4)"


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "pass seqlen="), ({"seqlen": -1}, "seqlen=-1"), ({"seqlen": 5, "causal": "yes"}, "causal must be")],
)
def test_what_is_wrong_with_a_question_is_said_each_time(asked, options, message):
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            masks.documents(OnGpu(2), **options)
    assert not asked


def test_questions_are_forgotten_when_they_are_many(asked, monkeypatch):
    monkeypatch.setattr(streams, "_MOST_CHECKED", 3)
    for texts in range(1, 9):
        masks.documents(OnGpu(texts), seqlen=50)
        assert len(streams._checked) <= 3
