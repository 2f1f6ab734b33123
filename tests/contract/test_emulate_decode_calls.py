"""Calls of flash_decode executed by the very kernels on a CPU: any call against float64, with unused memory
poisoned, in the plan that an H200 would get and in others."""

from __future__ import annotations

import numpy as np
import pytest
from decode_support import Case, make_case, prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200)
H200, A100 = Device.typical("sm_90"), Device.typical("sm_80")


def emulate(case: Case, device: Device = H200, layout: str = "bhsd", mode: str = "plain", **how):
    """As flash_decode would launch it: (operands, plan). The result is checked."""
    problem, operands = prepare(case, layout, on_gpu=True)
    plan = make_plan(problem, device, **how)
    emulation = run_plan(plan, operands, Execution(mode=mode))
    assert not emulation.findings
    case.check(operands["out"], operands["lse"])
    return operands, plan


HOW = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"num_splits": st.integers(1, 6)}),
    st.fixed_dictionaries({"algorithm": st.just("balanced"), "num_splits": st.integers(1, 12)}),
)
#: The kernels are compiled for each of these; what else a call may be is drawn.
VARIANTS = [
    {"dtype": "float16"},
    {"dtype": "bfloat16", "tokens": 3},
    {"dtype": "bfloat16", "paged": True},
    {"dtype": "float16", "paged": True, "new": 2, "tokens": 2},
    {"dtype": "float16", "new": 1},
    {"dtype": "bfloat16", "fp8": True, "paged": True, "new": 1},
    {"dtype": "float16", "fp8": True, "tokens": 2},
]


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: d.arch.name)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_any_call(variant, device):
    if variant.get("fp8") and device is A100:
        pytest.skip("e4m3 is converted by instructions of sm_89 and later")
    fixed = {n: x for n, x in variant.items() if n != "paged"}
    new = variant.get("new", 0)

    @given(
        lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
        page_size=st.sampled_from([1, 3, 16, 64, 128] if variant.get("paged") else [0]),
        heads=st.sampled_from([(1, 1), (4, 2), (8, 2), (16, 1)]),
        layout=st.sampled_from(["bhsd", "bshd"]),
        scale=st.sampled_from([None, 0.0, 0.3]),
        seed=st.integers(0, 99),
        how=HOW,
    )  # fmt: skip
    @settings(max_examples=12)
    def run(lengths, page_size, heads, layout, scale, seed, how):
        case = make_case(
            [n + new for n in lengths], heads=heads[0], kv_heads=heads[1], head_dim=64, page_size=page_size,
            scale=scale, seed=seed, **fixed,
        )  # fmt: skip
        emulate(case, device, layout, **how)

    run()


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("head_dim", [8, 40, 72, 128, 192, 256])
def test_head_dims(head_dim, schedule):
    emulate(make_case([65, 3], head_dim=head_dim, page_size=16), algorithm=schedule, num_splits=2)


@pytest.mark.parametrize("heads", [(4, 1), (24, 1), (40, 1)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_many_query_rows(heads, tokens):
    """Up to 640 rows of a key/value head: every height of tile, and several blocks of rows."""
    case = make_case([40, 0, 130], heads=heads[0], kv_heads=heads[1], tokens=tokens, head_dim=64)
    for how in ({}, {"num_splits": 2}, {"algorithm": "balanced", "num_splits": 7}):
        emulate(case, **how)


@pytest.mark.parametrize("page_size", [0, 16])
def test_what_is_appended_is_in_the_cache_and_nothing_else_changed(page_size):
    case = make_case([70, 2, 129], new=2, tokens=2, head_dim=64, page_size=page_size)
    options = case.options
    for how in ({}, {"num_splits": 3}, {"algorithm": "balanced", "num_splits": 5}):
        operands, _ = emulate(case, **how)
        for x in "kv":
            cache, was, new = (
                operands[f"{x}_cache"],
                getattr(case, f"{x}_cache"),
                options[f"{x}_new"],
            )
            expected = was.copy()
            for b, n in enumerate(case.lengths):
                for i, position in enumerate((n - 2, n - 1)):
                    at = b, position
                    if page_size:
                        at = operands["block_table"][b, position // page_size], position % page_size
                    expected[at[0], :, at[1]] = new[b, :, i]
            np.testing.assert_array_equal(cache.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_beyond_the_cache_stay_within_it(page_size):
    """On a GPU nobody can raise: they count as the capacity, and new tokens without room are dropped."""
    case = make_case([64, 64], capacity=64, page_size=page_size, head_dim=64)
    case.options["cache_seqlens"] = np.array([64, 64], np.int32)
    problem, operands = prepare(case, on_gpu=True)
    operands["cache_seqlens"] = np.array([2**31 - 1, 65], np.int32)
    run_plan(make_plan(problem, H200), operands, Execution(mode="checked"))
    case.check(operands["out"], operands["lse"])


@pytest.mark.parametrize("page_size", [0, 16])
def test_new_tokens_without_room_are_dropped(page_size):
    full, case = (make_case([64, 64], capacity=64, page_size=page_size, head_dim=64) for _ in range(2))
    case.options["cache_seqlens"] = np.array([60, 60], np.int32)
    case.options["k_new"] = case.options["v_new"] = np.full((2, 2, 2, 64), 7, np.float16)
    problem, operands = prepare(case, on_gpu=True)
    operands["cache_seqlens"] = np.array([2**31 - 1, 64], np.int32)
    run_plan(make_plan(problem, H200), operands, Execution(mode="checked"))
    full.check(operands["out"], operands["lse"])
    np.testing.assert_array_equal(operands["k_cache"].view(np.uint16), full.k_cache.view(np.uint16))
