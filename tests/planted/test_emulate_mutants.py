"""Bugs of the kernels' arithmetic and of what they leave to one another, planted in the real sources: inputs that show
them, and nothing to show in the kernels as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from changed_sources import with_changed
from decode_kernel_support import configs, operands_of, plan_of, splits
from decode_support import make_case
from support import assert_attention, make_inputs

from cufa.build import compiler
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate, run_plan

SCHEDULES = pytest.mark.parametrize("schedule", ["ascending", "descending", 1])


def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    found = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8").count(old)
    assert found == 1, f"{old!r} occurs {found} times in {file}"
    sources = with_changed(tmp_path, file, lambda text: text.replace(old, new))
    monkeypatch.setattr(compiler, "SOURCE_DIR", sources)


# ---- maxima that grow from tile to tile: P in float16 must not overflow where O is not rescaled

#: Of standard normal inputs: a row's maximum grows by up to 2^30 from one tile to the next.
SCALES = (0.5, 1.0)


def steep(algorithm: str, scale: float, causal: bool) -> tuple[list[np.ndarray], Emulation]:
    inputs = make_inputs(1, 2, 1, 200, 260, 64, "float16")
    return inputs, emulate(*inputs, causal=causal, scale=scale, algorithm=algorithm, trace=False)


def steep_decoding(kernel: str, scale: float) -> tuple[object, dict[str, np.ndarray]]:
    case = make_case([300, 200, 700], head_dim=64, tokens=2)
    case.options["scale"] = scale
    plan, operands = plan_of(case, kernel, 1), operands_of(case)
    plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, scale=scale))
    run_plan(plan, operands, Execution(), trace=False)
    return case, operands


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3", "naive"])
def test_steep_maxima(algorithm, causal, scale):
    inputs, run = steep(algorithm, scale, causal)
    assert_attention(run.out, run.lse, *inputs, causal=causal, scale=scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_balanced"])
def test_steep_maxima_decoding(kernel, scale):
    case, operands = steep_decoding(kernel, scale)
    case.check(operands["out"], operands["lse"])


def test_steep_inputs_show_a_slack_that_float16_does_not_have(tmp_path, monkeypatch):
    """Of 2^24, which P must not reach: 65,504 is the last number."""
    plant(tmp_path, monkeypatch, "shared/softmax.cuh", "int SLACK = 8", "int SLACK = 24")
    for algorithm in ("fa2", "fa3"):
        _, run = steep(algorithm, scale=0.5, causal=False)
        assert np.count_nonzero(~np.isfinite(run.out)) > 64, algorithm
    _, operands = steep_decoding("decode_split_tma", scale=1.0)
    assert not np.isfinite(operands["out"]).all()


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("m_lane[r] = quad_max(m_lane[r]);", ";"), ("grown |= m_lane[r]", "grown = m_lane[r]")],
    ids=["maxima of lanes", "last row alone"],
)
def test_maxima_of_lanes_that_are_no_maxima_of_rows(tmp_path, monkeypatch, algorithm, old, new):
    plant(tmp_path, monkeypatch, "shared/softmax.cuh", old, new)
    inputs, run = steep(algorithm, scale=1.0, causal=False)
    with pytest.raises(AssertionError):
        assert_attention(run.out, run.lse, *inputs, scale=1.0)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_maximum_that_one_lane_raises_alone(tmp_path, monkeypatch, algorithm):
    votes = "if (!warp_any(grown)) return false;\n#pragma unroll\n    for (int r = 0; r < ROWS; ++r) m_lane"
    plant(tmp_path, monkeypatch, "shared/softmax.cuh", votes, votes.replace("warp_any(grown)", "grown"))
    with pytest.raises(EmulationError, match="lanes"):
        steep(algorithm, scale=1.0, causal=False)


def below_zero() -> list[np.ndarray]:
    """Scores of -4,000 to -1,000, which grow from tile to tile as kernels walk them: from the last key to the first."""
    q, k, v = make_inputs(1, 2, 1, 200, 260, 64, "float16")
    q[...], k[...] = 1.0, -np.linspace(16.0, 64.0, 260, dtype=np.float16)[None, None, :, None]
    return [q, k, v]


def test_maxima_below_zero():
    inputs = below_zero()
    run = emulate(*inputs, algorithm="fa3", trace=False, scale=1.0)
    assert_attention(run.out, run.lse, *inputs, scale=1.0)


def test_integers_do_not_tell_of_maxima_below_zero(tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, "shared/softmax.cuh", " || m_scaled[r] < -SLACK", "")
    run = emulate(*below_zero(), algorithm="fa3", trace=False, scale=1.0)
    assert not np.isfinite(run.out).all()


# ---- several blocks of rows read the new tokens of one head; one of them stores these


def append(kernel: str, schedule: str | int) -> tuple[Emulation, object, dict[str, np.ndarray]]:
    """Eighty packed rows in blocks of sixteen."""
    case = make_case([150, 3, 200], heads=40, kv_heads=1, head_dim=64, tokens=2, new=2)
    config = next(c for c in configs(kernel, 64) if c.block_q == 16)
    plan, operands = plan_of(case, kernel, splits(kernel, 2), config), operands_of(case)
    return run_plan(plan, operands, Execution("checked", schedule), trace=False), case, operands


KERNELS = pytest.mark.parametrize(
    "kernel", ["decode_split_tma", "decode_balanced_tma", "decode_split", "decode_balanced"]
)


@SCHEDULES
@KERNELS
def test_one_of_several_blocks_of_rows_stores_new_tokens(kernel, schedule):
    run, case, operands = append(kernel, schedule)
    assert run.findings == ()
    case.check(operands["out"], operands["lse"])


@SCHEDULES
@KERNELS
def test_several_that_store_the_same_token_are_found(tmp_path, monkeypatch, kernel, schedule):
    """Though all of them store the same bits."""
    plant(tmp_path, monkeypatch, "decode/stream.cuh", "store_new = span.row_block == 0;", "store_new = true;")
    run, case, operands = append(kernel, schedule)
    case.check(operands["out"], operands["lse"])
    assert {f.kind for f in run.findings} == {"race"}
    assert any("of one launch both touch" in f.message and "k_cache" in f.message for f in run.findings)


def test_a_box_read_while_another_block_stores_is_found_where_it_is_used(tmp_path, monkeypatch):
    """A box brings rows of new tokens, old or new; where their place is not taken, products read them."""
    plant(
        tmp_path, monkeypatch, "decode/tma.cuh",
        "st_shared_vec4(target, hidden ? vec4{0, 0, 0, 0} : k);",
        "if (store_new) st_shared_vec4(target, hidden ? vec4{0, 0, 0, 0} : k);",
    )  # fmt: skip
    run, _, _ = append("decode_split_tma", "ascending")
    assert {f.kind for f in run.findings} == {"race"}
    assert any("reads a copy of" in f.message and "k_cache" in f.message for f in run.findings)
