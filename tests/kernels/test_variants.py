"""What `cufa compile` builds covers the registry, and the registry covers what the API promises."""

from __future__ import annotations

import itertools

import pytest

from cufa.build.variants import HEAD_DIMS, ODD_HEAD_DIMS, PAIRED, pairs_of, variants
from cufa.gpu.architectures import COMPILED_ARCHITECTURES, Device
from cufa.kernels import KERNELS, kernels_of
from cufa.plan.candidates import algorithms
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, Problem

FORWARD = kernels_of("forward")


@pytest.mark.in_turn
def test_all_kernels_together():
    """CI has a few minutes on two cores for them; `make compile-nightly` has the night for the product."""
    everything = list(variants())
    assert len(set(everything)) == len(everything) < 1000
    assert {v.spec.name for v in everything} == set(KERNELS)
    assert next(itertools.islice(variants(everything=True), 20 * 500, None), None) is not None


@pytest.mark.parametrize(
    ("kernel", "ablation"), [("fa2_forward", "fa2_noskip"), ("fa2_forward_f32", "fa2_noskip_f32")]
)
def test_an_ablation_is_built_only_where_it_skips_less(kernel, ablation):
    """Without a mask its machine code is the kernel's own."""
    found = list(variants(kernels=[kernel, ablation]))
    assert len(set(found)) == len(found)
    for name, masks in (kernel, KERNELS[kernel].masks), (ablation, KERNELS[ablation].masks[1:]):
        assert {v.problem.mask_kind for v in found if v.spec.name == name} == set(masks)


@pytest.mark.sampled(fixed=1, dated=3)
@pytest.mark.parametrize("name", KERNELS)
def test_the_builds_of_a_kernel_cover_its_choices(name):
    spec, mine = KERNELS[name], list(variants(kernels=[name]))
    possible = list(variants(kernels=[name], everything=True))
    assert_every_value_occurs(spec, mine, possible)
    assert_every_two_choices_meet(spec, mine, possible)
    assert_every_architecture_and_head_dim_occurs(spec, mine)
    for v in mine:
        assert all(launch.shared_memory <= v.arch.shared_memory_per_block for launch in v.launches), v
        assert spec.entry in {launch.entry for launch in v.launches}, v
        assert (v.problem.precision == "native") == (v.problem.dtype != "float32")
        assert v.problem.alignment >= v.problem.itemsize


def assert_every_value_occurs(spec, mine, possible):
    assert {v.config for v in mine} == {*spec.configs, *spec.split_configs}
    assert {v.problem.dtype for v in mine} == set(spec.dtypes)
    assert {v.problem.k_element.name for v in mine} == set(spec.k_dtypes or spec.dtypes)
    assert {v.problem.precision for v in mine} == set(spec.precisions)
    assert {v.problem.mask_kind for v in mine} == set(spec.masks)
    assert {v.problem.softcap is not None for v in mine} == {False, True}
    narrowest = 16 if spec.uses_copy_engine or spec.aligned_rows else min(v.problem.itemsize for v in mine)
    assert {v.problem.alignment for v in mine} == {n for n in (16, 8, 4, 2) if n >= narrowest}
    assert {(v.trace, v.problem.mask_kind) for v in mine} >= {(True, kind) for kind in spec.masks}
    own, of_product = ([spec.own_constants(v.problem) for v in builds] for builds in (mine, possible))
    for switch in own[0]:  # some have one value in all builds of a kernel
        assert {x[switch] for x in own} == {x[switch] for x in of_product}, switch


def assert_every_two_choices_meet(spec, mine, possible):
    pairs, own = pairs_of(mine[0]), spec.own_constants(mine[0].problem)
    wanted = itertools.combinations((*PAIRED, *own), 2)
    assert {frozenset(pair) for pair in pairs} >= {frozenset(pair) for pair in wanted}

    def met(found):
        return {(one, c[one], other, c[other]) for c in (v.choices for v in found) for one, other in pairs}

    assert met(mine) == met(possible)


def assert_every_architecture_and_head_dim_occurs(spec, mine):
    classes = {(v.arch.capability, v.choices["head dim class"]) for v in mine}
    for arch, head_dim in itertools.product(COMPILED_ARCHITECTURES, HEAD_DIMS):
        fits = fitting_configs(spec, head_dim, Device.typical(arch))
        assert ((arch, head_dim) in classes) == bool(fits)
    problems = [p for d in ODD_HEAD_DIMS for p in OPERATIONS[spec.operation].compiled(spec, d)]
    first = Device.typical(next(arch for arch in COMPILED_ARCHITECTURES if spec.runs_on(arch)))
    served = {
        p.head_dim for p in problems if spec.refuses(p) is None and fitting_configs(spec, p.head_dim, first)
    }
    assert {v.problem.head_dim for v in mine} >= served


def test_asking_for_less_gives_less():
    name = next(iter(KERNELS))
    few = list(variants([90], [name], [72]))
    assert {(v.arch.capability, v.spec.name, v.problem.head_dim) for v in few} == {(90, name, 72)}
    assert not any(v.trace for v in few)


PRECISIONS = {"float16": ("native",), "bfloat16": ("native",), "float32": ("float32", "tf32")}

#: What the API takes with algorithm="auto", and what each named algorithm says it serves.
OFFERED = {("auto", dtype, precision) for dtype, choices in PRECISIONS.items() for precision in choices} | {
    (spec.algorithm, dtype, precision)
    for spec in FORWARD.values()
    for dtype in spec.dtypes
    for precision in PRECISIONS.get(dtype, ())  # inputs of e4m3 have scales: test_float8_kernels.py
    if precision in spec.precisions
}


def test_every_algorithm_is_offered():
    assert {algorithm for algorithm, _, _ in OFFERED} == set(algorithms())


@pytest.mark.parametrize("arch", COMPILED_ARCHITECTURES)
@pytest.mark.parametrize(("algorithm", "dtype", "precision"), sorted(OFFERED))
def test_every_head_dim_has_a_kernel_on_every_architecture(arch, algorithm, dtype, precision):
    device = Device.typical(arch)
    if not any(spec.runs_on(arch) for spec in FORWARD.values() if algorithm in ("auto", spec.algorithm)):
        with pytest.raises(ValueError, match="needs sm_"):
            make_plan(Problem(1, 1, 1, 1024, 1024, 64, dtype, precision=precision), device, algorithm)
        return
    for head_dim in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
        problem = Problem(1, 1, 1, 1024, 1024, head_dim, dtype, precision=precision)
        plan = make_plan(problem, device, algorithm)
        assert all(launch.shared_memory <= device.arch.shared_memory_per_block for launch in plan.launches)
