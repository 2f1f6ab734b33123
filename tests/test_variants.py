"""What `cufa compile` builds covers the registry, and the registry covers what the API promises."""

from __future__ import annotations

import pytest

from cufa.core.architectures import COMPILED_ARCHITECTURES, Device
from cufa.core.problem import HEAD_DIM_STEP, ITEMSIZE, MAX_HEAD_DIM, Problem
from cufa.kernels import DECODE_KERNELS, KERNELS
from cufa.nvrtc.variants import HEAD_DIMS, ODD_HEAD_DIMS, variants
from cufa.planner import fitting_configs, make_plan

EVERYTHING = list(variants())


def test_no_variant_is_built_twice():
    assert len(set(EVERYTHING)) == len(EVERYTHING)


@pytest.mark.parametrize("name", KERNELS)
def test_every_config_dtype_precision_and_mask_is_built(name):
    spec = KERNELS[name]
    mine = [v for v in EVERYTHING if v.spec is spec]
    assert {v.config for v in mine} == set(spec.configs)
    assert {v.problem.dtype for v in mine} == set(spec.dtypes)
    assert {v.problem.precision for v in mine} == set(spec.precisions)
    # An ablation shares its kernel's source, and without a mask its machine code: that is built once.
    first_of_source = next(s for s in KERNELS.values() if s.source == spec.source) is spec
    assert {v.problem.causal for v in mine} == ({False, True} if first_of_source else {True})
    assert {v.trace for v in mine} == {False, True}
    assert {v.problem.alignment for v in mine} >= ({16} if KERNELS[name].uses_copy_engine else {16, 8, 4})


@pytest.mark.parametrize("name", KERNELS)
def test_every_architecture_and_standard_head_dim_is_built(name):
    spec = KERNELS[name]
    built = {(v.arch.capability, v.problem.head_dim) for v in EVERYTHING if v.spec is spec}
    for arch in COMPILED_ARCHITECTURES:
        for head_dim in HEAD_DIMS:
            fits = arch >= spec.min_capability and fitting_configs(spec, head_dim, Device.typical(arch))
            assert ((arch, head_dim) in built) == bool(fits)
    assert {head_dim for _, head_dim in built} >= set(ODD_HEAD_DIMS)


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_every_decode_config_cache_and_architecture_is_built(name):
    spec = DECODE_KERNELS[name]
    mine = [v for v in EVERYTHING if v.spec is spec]
    assert {v.config for v in mine} == set(spec.configs)
    assert {(v.problem.dtype, v.problem.cache_dtype) for v in mine} == {
        (dtype, cache) for dtype in spec.dtypes for cache in spec.cache_dtypes or (dtype,)
    }
    assert {v.arch.capability for v in mine} == {a for a in COMPILED_ARCHITECTURES if spec.runs_on(a)}
    constants = [v.constants for v in mine]
    for switch in ("PAGED", "RAGGED", "APPEND", "CAUSAL", "TRACE"):
        assert {c[switch] for c in constants} == {False, True}, switch


def test_a_variant_fits_the_block_limit_of_its_architecture():
    for v in EVERYTHING:
        assert all(launch.shared_memory <= v.arch.shared_memory_per_block for launch in v.launches), v


def test_float32_alone_has_a_choice_of_precision():
    for v in EVERYTHING:
        assert (v.problem.precision == "native") == (v.problem.dtype != "float32")
        assert v.problem.alignment >= ITEMSIZE[v.problem.dtype]


def test_asking_for_less_gives_less():
    name = next(iter(KERNELS))
    few = list(variants([90], [name], [72]))
    assert {(v.arch.capability, v.spec.name, v.problem.head_dim) for v in few} == {(90, name, 72)}
    assert not any(v.trace for v in few)


PRECISIONS = {"float16": ("native",), "bfloat16": ("native",), "float32": ("float32", "tf32")}

#: What the API takes with algorithm="auto", and what each named algorithm says it serves.
OFFERED = {("auto", dtype, precision) for dtype, choices in PRECISIONS.items() for precision in choices} | {
    (spec.algorithm, dtype, precision)
    for spec in KERNELS.values()
    for dtype in spec.dtypes
    for precision in PRECISIONS[dtype]
    if precision in spec.precisions
}


@pytest.mark.parametrize("arch", COMPILED_ARCHITECTURES)
@pytest.mark.parametrize(("algorithm", "dtype", "precision"), sorted(OFFERED))
def test_every_head_dim_has_a_kernel_on_every_architecture(arch, algorithm, dtype, precision):
    device = Device.typical(arch)
    if not any(spec.runs_on(arch) for spec in KERNELS.values() if algorithm in ("auto", spec.algorithm)):
        with pytest.raises(ValueError, match="only"):
            make_plan(Problem(1, 1, 1, 1024, 1024, 64, dtype, precision=precision), device, algorithm)
        return
    for head_dim in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
        problem = Problem(1, 1, 1, 1024, 1024, head_dim, dtype, precision=precision)
        plan = make_plan(problem, device, algorithm)
        assert all(launch.shared_memory <= device.arch.shared_memory_per_block for launch in plan.launches)
