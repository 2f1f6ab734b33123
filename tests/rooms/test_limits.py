"""The kernels whose rates are ceilings: compiled for every architecture, and executed on this CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cufa.build.static_compile import check_report, static_compile
from cufa.gpu.architectures import find_architecture
from cufa.kernels import Launch
from cufa.measure import limits
from cufa.run.emulate import build as host_build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

SOURCE = "limits/tensor_cores.cu"
KINDS = tuple(limits._FLOPS_A_PRODUCT)


@pytest.mark.in_turn
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("nvrtc")
def test_products_are_made_from_registers_and_nothing_else_is_in_their_loop(kind, arch):
    report = static_compile(SOURCE, limits._constants(kind), find_architecture(arch))
    assert not check_report(report)
    body = report.ptx.partition(".entry mma_limit")[2].partition(".entry")[0]
    # One loop, unrolled by a compiler that keeps a multiple of the products in it.
    assert body.count("mma.sync") % limits._PRODUCTS == 0 < body.count("mma.sync")
    loop = body[body.index("mma.sync") : body.rindex("mma.sync")]
    touched = {word.rpartition(".")[0] for word in loop.split() if word.startswith(("ld.", "st."))}
    assert touched <= {"ld.param"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_made(kind):
    """What the rate counts is what the kernel does."""
    iterations, threads = 3, 64
    sink = np.full(2 * threads, np.nan, np.float32)
    entry = host_build.kernel(
        SOURCE, limits._constants(kind), ["mma_limit"], True, ["__typeof__(float*)", "int"]
    )
    counters, findings = execute(
        entry["mma_limit"],
        Launch("mma_limit", (2, 1, 1), threads, 0),
        [ctypes.c_void_p(sink.ctypes.data), ctypes.c_int32(iterations)],
        [GlobalArray("sink", sink, True)],
        Execution("checked", threads=1),
    )
    assert not findings
    flops = threads // 32 * iterations * limits._PRODUCTS * limits._FLOPS_A_PRODUCT[kind]
    assert (2 * counters["products"]).tolist() == [flops] * 2, "the counter is of multiply-adds"
    assert np.isfinite(sink).all() and len(np.unique(sink)) == len(sink), (
        "operands are random, and sums are kept"
    )
