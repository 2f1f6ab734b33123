"""What `cufa compile` builds covers the registry, and the registry covers what the API promises."""

from __future__ import annotations

import functools
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


def is_first(spec):
    """Whether no kernel before it is of the same source, and would leave it fewer builds."""
    return next(s for s in KERNELS.values() if s.source == spec.source) is spec


@functools.cache
def built(name):
    """The builds of one kernel when no other is asked for."""
    if is_first(KERNELS[name]):
        return tuple(v for v in everything() if v.spec.name == name)
    return tuple(variants(kernels=[name]))


@functools.cache
def product(name):
    """All builds of one kernel, however many."""
    return tuple(variants(kernels=[name], everything=True))


@functools.cache
def everything():
    return tuple(variants())


def test_no_variant_is_built_twice():
    assert len(set(everything())) == len(everything())
    assert {v.spec.name for v in everything()} == set(KERNELS)


def test_builds_grow_with_the_choices_and_not_with_their_product():
    """CI has a few minutes on two cores for them; `make compile-nightly` has the night."""
    assert len(everything()) < 1000
    assert next(itertools.islice(variants(everything=True), 20 * 500, None), None) is not None


def test_an_ablation_is_built_only_where_it_skips_less():
    """Without a mask its machine code is the kernel's own."""
    for name, spec in FORWARD.items():
        masks = {v.problem.mask_kind for v in everything() if v.spec is spec}
        assert masks == set(spec.masks[0 if is_first(spec) else 1 :]), name


@pytest.mark.sampled(fixed=1, dated=2)
@pytest.mark.parametrize("name", KERNELS)
def test_every_config_element_mask_and_width_is_built(name):
    spec, mine = KERNELS[name], built(name)
    assert {v.config for v in mine} == {*spec.configs, *spec.split_configs}
    assert {v.problem.dtype for v in mine} == set(spec.dtypes)
    assert {v.problem.k_element.name for v in mine} == set(spec.k_dtypes or spec.dtypes)
    assert {v.problem.precision for v in mine} == set(spec.precisions)
    assert {v.problem.mask_kind for v in mine} == set(spec.masks)
    assert {v.problem.softcap is not None for v in mine} == {False, True}
    narrowest = 16 if spec.uses_copy_engine else min(v.problem.itemsize for v in mine)
    assert {v.problem.alignment for v in mine} == {n for n in (16, 8, 4, 2) if n >= narrowest}
    assert {(v.trace, v.problem.mask_kind) for v in mine} >= {(True, kind) for kind in spec.masks}
    own, possible = ([spec.own_constants(v.problem) for v in builds] for builds in (mine, product(name)))
    for switch in own[0]:  # some have one value in all builds of a kernel
        assert {x[switch] for x in own} == {x[switch] for x in possible}, switch


@pytest.mark.sampled(fixed=1, dated=2)
@pytest.mark.parametrize("name", KERNELS)
def test_every_two_choices_that_can_meet_do(name):
    own = KERNELS[name].own_constants(built(name)[0].problem)
    pairs = pairs_of(built(name)[0])
    assert {frozenset(pair) for pair in pairs} >= {
        frozenset((one, other)) for one in (*PAIRED, *own) for other in (*PAIRED, *own) if one != other
    }

    def met(found):
        return {(one, c[one], other, c[other]) for c in (v.choices for v in found) for one, other in pairs}

    assert met(built(name)) == met(product(name))


@pytest.mark.parametrize("name", KERNELS)
def test_every_architecture_and_head_dim_is_built(name):
    spec, mine = KERNELS[name], built(name)
    classes = {(v.arch.capability, v.choices["head dim class"]) for v in mine}
    for arch in COMPILED_ARCHITECTURES:
        for head_dim in HEAD_DIMS:
            fits = fitting_configs(spec, head_dim, Device.typical(arch))
            assert ((arch, head_dim) in classes) == bool(fits)
    problems = [p for d in ODD_HEAD_DIMS for p in OPERATIONS[spec.operation].compiled(spec, d)]
    first = Device.typical(next(arch for arch in COMPILED_ARCHITECTURES if spec.runs_on(arch)))
    served = {
        p.head_dim for p in problems if spec.refuses(p) is None and fitting_configs(spec, p.head_dim, first)
    }
    assert {v.problem.head_dim for v in mine} >= served


def test_a_variant_fits_the_block_limit_of_its_architecture():
    for v in everything():
        assert all(launch.shared_memory <= v.arch.shared_memory_per_block for launch in v.launches), v


def test_float32_alone_has_a_choice_of_precision():
    for v in everything():
        assert (v.problem.precision == "native") == (v.problem.dtype != "float32")
        assert v.problem.alignment >= v.problem.itemsize


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


def test_every_kernel_launches_the_entry_that_it_is_about():
    for variant in everything():
        assert variant.spec.entry in {launch.entry for launch in variant.launches}, str(variant)
