"""Planning: pure Python, so every kernel is planned for every architecture on any machine."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from sampling import of_today

import cufa
from cufa import masks
from cufa.build.compiler import SOURCE_DIR
from cufa.gpu.architectures import ARCHITECTURES, Device, find_architecture
from cufa.kernels import KERNELS, Kernel, kernels_of
from cufa.kernels.params import softmax_scalars
from cufa.plan.candidates import algorithms
from cufa.plan.dense import FORWARD
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import HEAD_DIM_STEP, MASK_KINDS, MAX_HEAD_DIM, Problem

ALGORITHMS = algorithms()

DEVICES = [Device.typical(capability) for capability in ARCHITECTURES]
HEAD_DIMS = range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
H200 = Device.typical(90)


def problem(dtype="float16", head_dim=64, mask=CAUSAL, precision=None, seqlen_q=300, seqlen_k=500) -> Problem:
    precision = precision or ("float32" if dtype == "float32" else "native")
    shape = 2, 6, 3, seqlen_q, seqlen_k, head_dim
    return Problem(*shape, dtype, mask, 0.125, precision=precision)


@functools.cache
def served(spec: Kernel) -> tuple[Problem, ...]:
    """What `cufa compile` builds of a kernel, for some head dims that it serves."""
    compiled = OPERATIONS[spec.operation].compiled
    multiples = [d for d in HEAD_DIMS if d % spec.head_dim_multiple == 0]
    head_dims = [d for d in multiples if any(config.fits(d) for config in spec.configs)]
    of_day = of_today(head_dims, f"head dims of {spec.name}", dated=2)
    problems = tuple(p for d in of_day for p in compiled(spec, d) if spec.refuses(p) is None)
    assert problems, f"{spec.name} serves nothing"
    return problems


def in_new_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- The registry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_registry_entries_are_complete(name):
    spec = KERNELS[name]
    assert spec.name == name
    assert all((SOURCE_DIR / source).is_file() for source in spec.sources)
    assert spec.configs
    assert len(set(spec.configs)) == len(spec.configs)
    for config in spec.configs:
        assert 1 <= config.num_warps <= 32, "a block has at most 1024 threads"
        assert config.block_q > 0 and config.block_kv > 0


def test_same_algorithm_means_same_schedule_and_disjoint_dtypes():
    for algorithm in ALGORITHMS[1:]:
        specs = [s for s in kernels_of("forward").values() if s.algorithm == algorithm]
        assert len({s.skip_masked_tiles for s in specs}) == 1
        served_pairs = [(d, p) for s in specs for d in s.dtypes for p in s.precisions]
        assert len(served_pairs) == len(set(served_pairs))


# --- Plans for GPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch.name)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.slow
def test_every_kernel_plans_for_every_architecture(name, device):
    spec = KERNELS[name]
    if not spec.runs_on(device.arch.capability):
        with pytest.raises(ValueError, match=rf"{device.arch.name}.*{name} needs sm_{spec.min_capability}"):
            make_plan(served(spec)[0], device, kernel=name)
        return
    for p in of_today(served(spec), f"{name} {device.arch.name}", fixed=3, dated=12):
        if not fitting_configs(spec, p.head_dim, device):
            continue
        plan = make_plan(p, device, kernel=name)
        assert plan.spec is spec
        config = dataclasses.replace(plan.config, page_box=0) if p.lengths.in_cache else plan.config
        assert config in (spec.split_configs if plan.split and spec.split_configs else spec.configs)
        assert plan.config.fits(p.head_dim)
        assert plan.backend == "cuda"
        assert plan.launches
        for launch in plan.launches:
            assert launch.shared_memory <= device.arch.shared_memory_per_block
            assert 32 <= launch.num_threads <= 1024
            assert all(n > 0 for n in launch.grid) and max(launch.grid[1:]) < 1 << 16
        assert plan.constants["HEAD_DIM"] == p.head_dim
        assert plan.constants["BLOCK_Q"] == plan.config.block_q == plan.schedule.block_q
        assert MASK_KINDS[plan.constants["MASK"]] == p.mask_kind
        assert (
            plan.constants["SKIP_MASKED_TILES"] is spec.skip_masked_tiles is plan.schedule.skip_masked_tiles
        )


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_auto_serves_every_dtype_and_head_dim_and_skips_masked_tiles(dtype, device):
    for head_dim in HEAD_DIMS:
        plan = make_plan(problem(dtype, head_dim), device)
        assert plan.spec.skip_masked_tiles
        assert dtype in plan.spec.dtypes


def test_auto_is_the_first_in_the_registry_that_serves():
    p = problem()
    serving = [s for s in kernels_of("forward").values() if s.refuses(p, 80) is None]
    assert make_plan(p, Device.typical(80)).spec is serving[0]


def test_a_config_can_be_asked_for():
    spec = make_plan(problem(), H200, "fa2").spec
    for config in fitting_configs(spec, 64, H200):
        assert make_plan(problem(), H200, "fa2", config=config).config is config


def test_plan_has_workspace_of_its_kernel():
    p = problem()
    assert make_plan(p, H200, "fa2").workspace == 0
    # At least float32 scores and 16-bit probabilities, and at least O in float32.
    assert make_plan(p, H200, "naive").workspace >= 2 * 6 * 300 * 500 * 6
    assert make_plan(p, H200, "fa1").workspace >= 2 * 6 * 300 * 64 * 4


# --- Plans for the CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_cpu_runs_every_algorithm_in_every_dtype(algorithm, dtype):
    plan = make_plan(problem(dtype), None, algorithm)
    assert plan.backend == "cpu"
    assert plan.config is FORWARD.cpu_config
    assert plan.launches == ()
    assert algorithm in ("auto", plan.spec.algorithm)
    assert plan.schedule.skip_masked_tiles == plan.spec.skip_masked_tiles
    assert plan.spec.skip_masked_tiles == (algorithm in ("auto", "fa2", "fa3"))


# --- Masks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "as_good_as"),
    [
        (Band(499, None), FULL),
        (Band(299, 499, "top-left"), FULL),
        (Band(499, 0), CAUSAL),
        (Band(10**9, 200, "top-left"), CAUSAL),
    ],
    ids=str,
)
def test_a_bound_that_hides_nothing_is_planned_as_if_absent(mask, as_good_as):
    plan, other = (make_plan(problem(mask=x), H200) for x in (mask, as_good_as))
    assert plan.problem.edges == other.problem.edges
    assert plan.constants == other.constants
    assert (plan.launches, plan.spec, plan.config) == (other.launches, other.spec, other.config)


# --- Architectures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [90, "90", "sm_90", "sm_90a"])
def test_architecture_by_any_name(name):
    assert find_architecture(name) is ARCHITECTURES[90]
    assert find_architecture(name).nvrtc_name == "sm_90a"


def test_newer_minor_versions_are_planned_as_the_one_below():
    assert find_architecture("sm_103") is ARCHITECTURES[100]
    assert find_architecture(121) is ARCHITECTURES[120]


# --- What planning must not need --------------------------------------------------------------------------


def test_planning_needs_no_cupy():
    in_new_python(
        "import sys\n"
        "sys.modules['cupy'] = sys.modules['cuda'] = None  # importing either fails\n"
        "from cufa.gpu.architectures import Device\n"
        "from cufa.kernels import KERNELS\n"
        "from cufa.plan.planner import make_plan\n"
        "from cufa.plan.operation import OPERATIONS\n"
        "for spec in KERNELS.values():\n"
        "    problem = next(iter(OPERATIONS[spec.operation].compiled(spec, spec.configs[0].max_head_dim)))\n"
        "    print(make_plan(problem, Device.typical(spec.min_capability), kernel=spec.name))\n"
        "import cufa\n"
        "assert 'CPU' in str(cufa.plan((1, 2, 64, 64), device='cpu'))\n"
        "import cufa.problem.mask_records  # reads records of every family\n"
        "families = {*cufa.masks.Mask.families}\n"
        "assert families == {'band', 'columns', 'chunks', 'bits', 'combined', 'tree', 'where'}\n"
        "assert 'sm_80' in str(cufa.plan((1, 2, 64, 64), device='sm_80'))\n"
    )


# --- Numbers and bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nothing_is_in_order_where_nothing_is_launched(arch):
    assert make_plan(Problem(1, 8, 8, 64, 0, 128, "float16", CAUSAL), Device.typical(arch)).order is None


def test_scalars_of_a_soft_cap_are_finite_in_float32():
    for value in softmax_scalars(1e3, 1.2e-38).values():
        assert math.isfinite(ctypes.c_float(value).value)


def test_a_scale_of_0_is_no_0_in_a_kernel():
    """0 times a masked score of -inf would be NaN."""
    value = ctypes.c_float(softmax_scalars(0.0, None)["scale_log2"]).value
    assert 0 < value < 1e-37


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "cpu"])
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.documents([5, 7]), masks.prefix([3]), masks.chunks(4)], ids=str
)
def test_a_plan_equals_its_copy(mask, device):
    for plan in (
        cufa.plan((1, 2, 12, 64), mask=mask, device=device),
        cufa.plan_backward((1, 2, 12, 64), mask=mask, device=device),
        cufa.plan_decode((1, 2, 1, 64), (1, 2, 12, 64), device=device),
    ):
        for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
            assert copied == plan and str(copied) == str(plan) and copied.spec is plan.spec


def test_a_persistent_launch_has_no_more_blocks_than_items():
    few = make_plan(problem(seqlen_q=100, seqlen_k=100), H200, "fa3")
    items = few.problem.batch * few.problem.heads * few.schedule.num_q_blocks
    assert few.launches[0].persistent and items < H200.num_sms
    assert few.launches[0].grid == (items, 1, 1)
    many = make_plan(problem(seqlen_q=10_000, seqlen_k=100), H200, "fa3")
    assert many.launches[0].grid == (H200.num_sms, 1, 1)


def test_the_largest_grid_is_planned_and_no_larger():
    def decoding(batch: int) -> Problem:
        lengths = Cached(page_size=0, max_pages=0, num_pages=0, given=True, new_tokens=0)
        return Problem(
            batch, 8, 8, 1, 64, 64, "float16", CAUSAL, 0.125, lengths=lengths, operation="decode",
            alignment=16,
        )  # fmt: skip

    plan = make_plan(decoding(65_535), H200, "fixed")
    assert max(plan.launches[0].grid[1:]) == 65_535
    with pytest.raises(ValueError, match="CUDA limits the last two axes to 65,535"):
        make_plan(decoding(65_536), H200, "fixed")


@pytest.mark.parametrize("num_splits", [0, -1])
def test_a_number_of_splits_is_at_least_1(num_splits):
    with pytest.raises(ValueError, match=f"num_splits={num_splits} is not possible"):
        make_plan(problem(), H200, num_splits=num_splits)


@pytest.mark.parametrize(
    ("heads", "seqlen", "causal", "block_kv"),
    [
        ((1, 32, 8), 1024, True, 64),  # 64 blocks of 128 keys on 132 SMs
        ((2, 32, 8), 1024, True, 64),  # 128 of unequal length
        ((2, 32, 8), 1024, False, 128),  # 128 of equal length
        ((1, 32, 8), 4096, True, 128),  # enough to share out evenly
        ((2, 32, 32), 1024, True, 128),
    ],
    ids=str,
)
def test_few_key_blocks_are_cut_in_two(heads, seqlen, causal, block_kv):
    batch, heads_q, heads_k = heads
    q, k = (batch, heads_q, seqlen, 128), (batch, heads_k, seqlen, 128)
    plan = cufa.plan_backward(q, k, k, causal=causal, dtype="bfloat16", algorithm="fa2", device="sm_90")
    assert plan.config.block_kv == block_kv


def test_the_order_of_a_masks_query_blocks_belongs_to_the_mask():
    """Kernels read it: it must live as long as what the caller keeps, and not be worked out for every plan."""
    begin = np.arange(1200, dtype=np.int32) % 600
    mask, shape = cufa.masks.columns(begin, begin + 600), (1, 2, 1200, 64)
    plans = [cufa.plan(shape, mask=mask, dtype="float16", device="sm_90") for _ in range(2)]
    first, second = (x.block_order for x in plans)
    assert first is second is not None
    assert any(first is x for x in mask.block_orders.values())
    causal = cufa.plan(shape, mask=cufa.masks.prefix(9), dtype="float16", device="sm_90")
    assert causal.block_order is None
