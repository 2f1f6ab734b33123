"""ALiBi and sinks in the decode kernels, executed on a CPU in checked mode: right against float64 with unused memory
poisoned, however many parts a row has and wherever they are merged. Every build is for the GPU's tests; here is one of
each branch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from decode_kernel_support import assert_spans, configs, operands_of, plan_of, splits
from decode_scores_support import assert_right, numbers_of_heads
from decode_support import make_case

from cufa.gpu.architectures import Device
from cufa.kernels.decode import items, row_blocks
from cufa.problem.mask import CAUSAL, Band
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution

A100 = Device.typical("sm_80")

#: By kernel. A sequence without keys, and tokens before the first key of one, in most of them.
CASES = {
    # Pages of whole boxes, appended tokens; query heads and tokens packed in a tile.
    "decode_split_tma": {"lengths": [2, 150, 200], "tokens": 3, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages, a head dim with half a k16 step, merged in the same launch.
    "decode_balanced": {"lengths": [150, 0, 260], "tokens": 2, "head_dim": 72, "page_size": 3},
    # 64 rows and several blocks of them, two heads' tokens across their border; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 90], "heads": 40, "kv_heads": 1, "tokens": 3, "head_dim": 64},
    "decode_split_tma_fp8": {"lengths": [150, 0, 200], "head_dim": 128, "fp8": True, "dtype": "bfloat16"},
    "decode_split_fp8": {"lengths": [150, 2], "head_dim": 80, "fp8": True, "new": 1, "page_size": 16},
}  # fmt: skip
SOFTCAPPED = {"decode_balanced": 2.0, "decode_split_tma_fp8": 1.5}
WINDOWED = {"decode_split_tma": 100, "decode_split_fp8": 40}


def case_of(kernel, few, windowed=True, **changes):
    made = {**CASES[kernel], **changes}
    scores = {"softcap": SOFTCAPPED.get(kernel)}
    scores |= numbers_of_heads(few, len(made["lengths"]), made.get("heads", 4))
    if windowed and kernel in WINDOWED:
        scores["window"] = (WINDOWED[kernel], 0)
    return make_case(**made, **scores)


def run(case, kernel, num_splits, config=None, **options):
    window, softcap = case.options.get("window"), case.options.get("softcap")
    mask = CAUSAL if window is None else Band(window[0], 0)
    plan = plan_of(case, kernel, num_splits, config, mask=mask, softcap=softcap)
    operands = operands_of(case)
    done = run_plan(plan, operands, Execution("checked", **options))
    assert not done.findings, "\n".join(map(str, done.findings))
    assert_right(case, operands["out"], operands["lse"])
    assert_spans(plan, case.lengths, done.records)
    return done, operands


@pytest.mark.parametrize(
    ("kernel", "few"),
    [
        ("decode_split_tma", "both"),
        ("decode_balanced", "sink"),
        ("decode_balanced", "alibi_of_batch"),
        ("decode_balanced_tma", "both"),
        ("decode_split_tma_fp8", "sink"),
        ("decode_split_tma_fp8", "alibi"),
        ("decode_split_fp8", "both"),
    ],
)
def test_kernel(kernel, few):
    """Whatever the number of splits: one, where the result leaves at once, and several, of which some are empty."""
    case, parts = case_of(kernel, few), []
    for num_splits in (1, 3, 7):
        done, _ = run(case, kernel, splits(kernel, num_splits))
        parts.append(len(done.records) > items(done.plan.problem, done.plan.config))
    assert any(parts) and not all(parts)


def test_heads_and_tokens_of_every_block_of_rows():
    """36 rows share keys: three blocks of 16, whose heads and tokens go on where the block before ended."""
    case = case_of("decode_split_tma", "both", heads=12, kv_heads=1)
    done, _ = run(case, "decode_split_tma", 2, configs("decode_split_tma", 64)[0])
    assert row_blocks(done.plan.problem, done.plan.config) == 3


@pytest.mark.parametrize(("name", "few"), [("decode_split_tma", "sink"), ("decode_split_tma_fp8", "both")])
def test_merged_in_a_cluster(name, few):
    case = case_of(name, few, windowed=False, lengths=[1100, 3, 200])
    config = configs(name, case.q.shape[3])[0].merged_in_cluster()
    for num_splits, order in ((1, "ascending"), (4, "descending"), (8, 1)):
        done, _ = run(case, name, num_splits, config, schedule=order)
        assert [launch.cluster for launch in done.plan.launches] == [num_splits]


@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_balanced"])
def test_merged_by_a_launch_of_its_own(kernel):
    case = case_of(kernel, "both")
    config = dataclasses.replace(configs(kernel, case.q.shape[3])[0], fold_combine=False)
    done, _ = run(case, kernel, splits(kernel, 5), config)
    assert len(done.plan.launches) == 2


@pytest.mark.parametrize("few", ["both", "alibi_of_batch"])
def test_by_cp_async_on_ampere(few):
    case = case_of("decode_split_tma", few)
    plan = plan_of(case, "decode_split", 3, device=A100, mask=Band(case.options["window"][0], 0))
    operands = operands_of(case)
    assert not run_plan(plan, operands, Execution("checked")).findings
    assert_right(case, operands["out"], operands["lse"])


def test_a_row_that_sees_no_key_gives_zeros_and_its_sink():
    case = case_of("decode_balanced", "sink")
    _, operands = run(case, "decode_balanced", splits("decode_balanced", 3))
    assert not operands["out"][1].any()
    np.testing.assert_array_equal(operands["lse"][1], np.broadcast_to(case.options["sink"][:, None], (4, 2)))


def test_a_sink_of_minus_infinity_is_none():
    """To the last bit."""
    case = case_of("decode_split_tma", "sink")
    case.options["sink"] = np.full(4, -np.inf, np.float32)
    _, with_none = run(case, "decode_split_tma", 3)
    del case.options["sink"]
    _, without = run(dataclasses.replace(case), "decode_split_tma", 3)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(with_none[name], without[name])
