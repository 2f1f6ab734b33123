"""Bugs planted in the real kernels: each is found, and the same run of the kernel as it stands finds nothing."""

from __future__ import annotations

import pytest
from bugs_backward import FA2_BACKWARD, FA2_BACKWARD_F32
from bugs_backward_hopper import FA3_BACKWARD, FA3_BACKWARD_PASSES, FA3_BACKWARD_WIDE
from bugs_contract import CONTRACTS
from bugs_forward import DECODE_APPEND, DECODE_MERGE, DECODE_PAGES, FA2_FORWARD, FA3_LISTS, SOFTMAX
from planted_runs import Bug, steep, steep_decoding

BUGS = {
    "fa2_backward": FA2_BACKWARD,
    "fa2_backward_f32": FA2_BACKWARD_F32,
    "fa3_backward": FA3_BACKWARD,
    "fa3_backward, passes beside tiles": FA3_BACKWARD_PASSES,
    "fa3_backward_wide": FA3_BACKWARD_WIDE,
    "fa3_forward, listed tiles": FA3_LISTS,
    "fa2_forward": FA2_FORWARD,
    "softmax": SOFTMAX,
    "decode, merge in clusters": DECODE_MERGE,
    "decode, new tokens": DECODE_APPEND,
    "decode, pages": DECODE_PAGES,
    **CONTRACTS,
}
ALL = [pytest.param(group, bug, id=f"{group}-{bug.what}") for group, bugs in BUGS.items() for bug in bugs]
#: Each run once.
RUNS = {(group, str(bug.run)): (group, bug.run) for group, bugs in BUGS.items() for bug in bugs}


@pytest.mark.sampled(each="group")
@pytest.mark.parametrize(("group", "bug"), ALL)
def test_a_planted_bug_is_found(plant, group: str, bug: Bug):
    plant(bug.file, bug.old, bug.new)
    found = bug.run()
    assert any(kind in found for kind in bug.kinds.split()), found or "nothing found"


@pytest.mark.sampled(each="group", fixed=0)
@pytest.mark.parametrize(("group", "run"), RUNS.values())
def test_without_a_bug_nothing_is_found(group: str, run):
    assert run() == ""


@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3", "naive"])
def test_steep_maxima(algorithm: str, causal: bool, scale: float):
    assert steep(algorithm, scale, causal) == ""


@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_balanced"])
def test_steep_maxima_decoding(kernel: str, scale: float):
    assert steep_decoding(kernel, scale) == ""
