"""What a plan says of itself, and what refusals say: the argument, what came, and what would do."""

from __future__ import annotations

import dataclasses
import html as markup
import re

import pytest
from test_planner import H200, problem

import cufa
from cufa.gpu.architectures import Device, find_architecture
from cufa.kernels import KERNELS, TileConfig
from cufa.kernels.forward.fa2 import Fa2Config
from cufa.measure.decode_cases import make_decode
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, FULL, Mask
from cufa.problem.problem import Problem

# --- Plans ----------------------------------------------------------------------------------------------


def test_text_says_what_runs_and_why():
    text = str(make_plan(problem(), H200, "fa2"))
    for part in (
        "batch 2, heads 6/3, seqlen 300×500",
        "fa2_forward",
        "H200 (sm_90)",
        "visited",
        "skipped",
        "launch     fa2_forward grid",
        "threads",
        "B shared",
        "workspace  0 B",
        "because    algorithm='fa2' was asked for",
        "because    tiles",
    ):
        assert part in text, text


@pytest.mark.parametrize("device", [H200, None])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_shell_shows_five_lines_and_a_notebook_the_text(device, operation):
    plan = make_plan(dataclasses.replace(problem(), operation=operation), device)
    assert len(repr(plan).splitlines()) <= 5 and plan.spec.name in repr(plan) and "tiles" in repr(plan)
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th><td[^>]*>(.*?)</td></tr>", plan._repr_html_())
    assert [f"{name:11}{markup.unescape(text)}" for name, text in rows] == str(plan).splitlines()


def test_text_of_a_cpu_plan():
    text = str(make_plan(problem(), None))
    assert "CPU (NumPy)" in text
    assert "tiles      256×512; " in text, "no warps on a CPU"
    assert "launch" not in text and "workspace" not in text


def test_text_counts_tiles_of_all_heads():
    plan = make_plan(problem(seqlen_q=4096, seqlen_k=4096), None, "fa2", config=TileConfig(512, 512, 0))
    assert "432 of 768 visited, 336 skipped" in str(plan)  # 36 of 64 a head, 2 × 6 heads


@pytest.mark.parametrize(("arch", "how"), [("sm_90", "TMA"), ("sm_80", "cp.async")])
def test_a_decode_plan_says_why_its_kernel_and_nothing_of_measured_classes(arch, how):
    """Its kernel follows from the cut of the keys; no class of decode problems is ever measured."""
    text = str(make_plan(make_decode(1, 32, 8, 8192), Device.typical(arch)))
    assert (
        f"because    auto: kernels that read the cache by {how}; the splits below select one of them" in text
    )
    assert "measured" not in text


def test_tiles_that_were_never_measured_say_so():
    for arch, words in (
        ("sm_90", "measured on an H200 or H100 for other shapes"),
        ("sm_80", "never measured on sm_80"),
        ("sm_120", "sm_120"),
    ):
        plan = cufa.plan_backward((1, 8, 1024, 128), device=arch)
        assert any(words in reason for reason in plan.reasons), plan.reasons


# --- Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, H200], ids=["cpu", "gpu"])
def test_unknown_algorithm_is_named_with_the_choices(device):
    with pytest.raises(ValueError, match=r"algorithm='flash'.*auto.*fa2.*fa1.*naive"):
        make_plan(problem(), device, "flash")


def test_unserved_dtype_is_named_with_what_is_served():
    with pytest.raises(
        ValueError,
        match=r"'fa1'.*float64.*fa1_forward takes float16 and bfloat16, not float64.*\.astype.*'auto'",
    ):
        make_plan(problem("float64"), H200, "fa1")
    with pytest.raises(
        ValueError,
        match=r"'auto'.*float64.*fa2_forward_f32 takes float32, not float64.*convert with \.astype",
    ):
        make_plan(problem("float64"), H200)


@pytest.mark.parametrize(
    ("algorithm", "names"), [("fa3", ["fa3"]), ("fa2", ["fa2"]), ("auto", ["fa3", "fa2"])]
)
def test_only_kernels_that_take_the_elements_say_why_they_do_not_serve(algorithm, names):
    e4m3 = Problem(
        1, 4, 2, 8, 8, 64, "float8_e4m3", FULL, 0.1, out_dtype="bfloat16", scales=("head", "head", "block")
    )
    with pytest.raises(ValueError, match="no kernel runs") as raised:
        make_plan(e4m3, H200, algorithm)
    why = str(raised.value).split("(sm_90): ")[1].split(". Fix:")[0].split("; ")
    assert why == [f"{x}_forward_fp8 takes v_scale per tensor and head, not per block" for x in names]


def test_a_kernel_says_why_it_does_not_serve_and_auto_goes_on():
    rows_of_8_bytes = dataclasses.replace(problem(), alignment=8)
    with pytest.raises(ValueError, match="fa3_forward needs 16-byte aligned rows, not 8"):
        make_plan(rows_of_8_bytes, H200, "fa3")
    plan = make_plan(rows_of_8_bytes, H200)
    assert plan.spec.name == "fa2_forward" and "needs 16-byte aligned rows" in str(plan)
    pages = Problem(
        1, 2, 2, 1, 30, 64, "float16", CAUSAL, operation="decode", lengths=Cached(3, 10, 10, given=True)
    )
    with pytest.raises(ValueError, match="reads boxes of 16 keys, which pages of 3 would cut"):
        make_plan(pages, H200, kernel="decode_split_tma")
    assert not make_plan(pages, H200).spec.uses_copy_engine


def test_a_mask_that_no_kernel_serves_is_refused_with_its_name():
    @dataclasses.dataclass(frozen=True)
    class Checkered(Mask):
        pass

    problem = Problem(1, 8, 8, 64, 64, 128, "float16", Checkered())
    try:
        with pytest.raises(ValueError, match=r"fa3_forward serves band masks, not checkered.*cufa\.masks"):
            make_plan(problem, Device.typical("sm_90"))
        with pytest.raises(
            NotImplementedError, match=r"Checkered define no edges\(\): pass one made by cufa.masks"
        ):
            str(problem.edges)
    finally:
        del Mask.families["checkered"]


@pytest.mark.parametrize("num_splits", [None, 4])
def test_a_refusal_to_split_keys_names_the_arguments_that_were_passed(num_splits):
    invariant = dataclasses.replace(problem(), invariant=True)
    config = KERNELS["fa2_forward"].split_configs[0]
    with pytest.raises(ValueError, match=r"config=.*keys cannot be split.*without split_keys") as refused:
        make_plan(invariant, H200, "fa2", config, num_splits=num_splits)
    assert ("num_splits=4" in str(refused.value)) == (num_splits == 4)
    assert "num_splits=None:" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^num_splits=3: keys cannot be split.*leave num_splits at None$"):
        make_plan(invariant, H200, "fa2", num_splits=3)


def test_a_config_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"config=4096×4096.*shared memory.*sm_90"):
        make_plan(problem(), H200, "fa2", config=Fa2Config(4096, 4096, 4))


@pytest.mark.parametrize("name", ["sm_75", "70", "hopper", ""])
def test_unsupported_architectures_are_named_with_the_choices(name):
    with pytest.raises(ValueError, match=f"{name}.*sm_80"):
        find_architecture(name)
