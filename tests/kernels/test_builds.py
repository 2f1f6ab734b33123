"""Builds of the registered kernels by NVRTC: parameters, ablations, spills, stamps. No GPU needed."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from cufa.build.compiler import trace_constants
from cufa.build.static_compile import CompileError, compile_text, executable, nvrtc_version, static_compile
from cufa.build.sweep import build
from cufa.build.variants import Variant, variants
from cufa.gpu.architectures import ARCHITECTURES, COMPILED_ARCHITECTURES, Device
from cufa.kernels import KERNELS
from cufa.kernels.params import TRACE_RECORD, Strides
from cufa.plan.operation import OPERATIONS

AMPERE, HOPPER = ARCHITECTURES[80], ARCHITECTURES[90]


# The kernels' one argument: the same bytes in CUDA and in Python


def _layout_asserts() -> str:
    """static_asserts that hold the operations' parameter structures to their Python twins, field by field."""
    params = [*(operation.params for operation in OPERATIONS.values()), OPERATIONS["forward"].float8_params]
    params.append(OPERATIONS["forward"].cache_params)
    headers = ["forward/fa2/config.cuh", *sorted({p.header for p in params})]
    lines = [f'#include "{header}"' for header in headers]

    def same(what: str, value: int) -> None:
        lines.append(f'static_assert({what} == {value}, "{what}");')

    for name, python in (("Strides", Strides), *((p.struct, p.ctype) for p in params)):
        same(f"sizeof({name})", ctypes.sizeof(python))
        for field in (field for field, *_ in python._fields_ if field != "padding_"):
            same(f"__builtin_offsetof({name}, {field})", getattr(python, field).offset)
            same(f"sizeof({name}::{field})", getattr(python, field).size)
    same("sizeof(TraceRecord)", TRACE_RECORD.itemsize)
    for field, (dtype, offset) in TRACE_RECORD.fields.items():
        same(f"__builtin_offsetof(TraceRecord, {field})", offset)
        same(f"sizeof(TraceRecord::{field})", dtype.itemsize)
    return "\n".join(lines) + "\n"


def test_params_are_packed_as_the_kernels_read_them(nvrtc):
    if int(nvrtc_version().split(".")[0]) < 13:
        pytest.skip("NVRTC 12 has no __builtin_offsetof")
    unit = _layout_asserts()
    compile_text(unit, AMPERE)
    offset = OPERATIONS["forward"].params.offset("scale_log2")
    wanted = f"__builtin_offsetof(AttentionParams, scale_log2) == {offset}"
    assert wanted in unit
    with pytest.raises(CompileError, match="scale_log2"):  # the asserts are evaluated
        compile_text(unit.replace(wanted, wanted + "4"), AMPERE)


# The registered kernels: a few small variants each; `cufa compile` builds a covering set of them


ABLATIONS = [
    (first.name, second.name)
    for first in KERNELS.values()
    for second in KERNELS.values()
    if first.source == second.source and first.skip_masked_tiles and not second.skip_masked_tiles
]


@pytest.mark.sampled(fixed=0, dated=1)
@pytest.mark.parametrize(("kernel", "ablation"), ABLATIONS)
def test_without_a_mask_an_ablation_is_the_same_machine_code(kernel, ablation, nvrtc):
    """So `cufa compile` builds it once, and a benchmark of the two without a mask measures noise."""
    first = (next(variants([90], [name], [64], everything=True)) for name in (kernel, ablation))
    one, other = map(build, first)
    assert one.variant.constants != other.variant.constants
    assert one.variant.problem.mask_kind == "full"
    code, same = ([*executable(x.report.cubin)] for x in (one, other))
    assert code and code == same


SERVED = [
    (name, arch) for name, spec in KERNELS.items() for arch in COMPILED_ARCHITECTURES if spec.runs_on(arch)
]


@pytest.mark.sampled(fixed=1, dated=1)  # `make compile-all` builds all of them
@pytest.mark.parametrize(("kernel", "arch"), SERVED)
@pytest.mark.slow
def test_registered_kernel_compiles_clean(kernel, arch, nvrtc):
    """With bounds on both sides, which take most code."""
    head_dim = next(d for d in (64, 192) if any(config.fits(d) for config in KERNELS[kernel].configs))
    found = variants([arch], [kernel], [head_dim], everything=True)
    variant = next(variant for variant in found if variant.problem.mask_kind == "band")
    built = build(variant)
    assert built.findings == ()
    assert built.report.warnings == ()
    assert len(built.entries) == len({launch.entry for launch in variant.launches})
    assert all(entry.occupancy.blocks >= 1 for entry in built.entries)


@pytest.mark.sampled(fixed=1, dated=1)
@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (64, 128), (40, 72), (8, 256)])
@pytest.mark.parametrize(("kernel", "arch"), [x for x in SERVED if KERNELS[x[0]].any_v_dim])
@pytest.mark.slow
def test_values_of_another_head_dim_compile_clean(kernel, arch, dims, nvrtc):
    spec, device = KERNELS[kernel], Device.typical(arch)
    problems = OPERATIONS[spec.operation].compiled(spec, dims[0])
    problem = next(p for p in problems if p.mask_kind == "band" and spec.refuses(p) is None)
    problem = dataclasses.replace(problem, v_head_dim=dims[1])
    fitting = spec.fitting(spec.configs + spec.v_configs, dims[0], device, dims[1])
    if not fitting:
        pytest.skip(f"{kernel} has no tiles for {dims}")
    built = build(Variant(spec, spec.choose(problem, fitting, device), problem, device.arch))
    assert built.findings == ()
    assert built.report.warnings == ()


@pytest.mark.parametrize(("kernel", "head_dim"), [("fa3_forward", 64), ("decode_split", 64)])
@pytest.mark.sampled(fixed=0, dated=1)
@pytest.mark.slow
def test_product_builds_have_nothing_of_stamps(kernel, head_dim, nvrtc):
    """They never read the clock of an SM; builds with stamps do."""
    variant = next(variants([90], [kernel], [head_dim], everything=True))
    constants = variant.constants
    assert "%clock" not in static_compile(variant.source, constants, HOPPER).ptx
    stamped = {**constants, **trace_constants(True, inside=True)}
    assert static_compile(variant.source, stamped, HOPPER).ptx.count("%clock") > 5
