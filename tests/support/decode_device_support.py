"""What tests of device arrays without a GPU share: arrays over addresses that nothing backs, and launches that are only
logged."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest

from cufa.calls import dispatch
from cufa.calls import warm as seen
from cufa.gpu.architectures import Device
from cufa.plan.operation import OPERATIONS

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array(number, shape, dtype=BFLOAT16):
    memory = cp.cuda.UnownedMemory(number << 40, 1 << 39, None, 0)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


@pytest.fixture
def launches(monkeypatch):
    """What would have been launched: (plan, operands, addresses); the plan is None on the short cut."""
    from cufa.run.cuda import backend as cuda

    log = []

    class Binding:
        def __init__(self, plan, given):
            assert tuple(given) == tuple(x.name for x in OPERATIONS["decode"].operands)
            self.first = plan, given

        def launch(self, addresses):
            log.append((*self.first, tuple(addresses)))
            self.first = None, None

        launch_here = launch

    monkeypatch.setattr(seen, "_calls", {})
    monkeypatch.setattr(cuda, "prepare", lambda plan, device_id: plan)
    monkeypatch.setattr(cuda, "Binding", Binding)
    monkeypatch.setattr(cuda, "device", lambda device_id: Device.typical("sm_90"))
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cp.cuda, "Device", lambda device_id: contextlib.nullcontext())
    monkeypatch.setattr(dispatch, "check_not_capturing", lambda name: None)
    monkeypatch.setattr(cp, "asarray", lambda x: array(100 + len(x), x.shape, x.dtype))
    return log


def given(layout="bhsd", fp8=False):
    cache = np.uint8 if fp8 else BFLOAT16
    shapes = {"q": (4, 32, 2, 128), "k_cache": (1000, 8, 16, 128), "v_cache": (1000, 8, 16, 128)}
    shapes |= {"k_new": (4, 8, 2, 128), "v_new": (4, 8, 2, 128), "out": (4, 32, 2, 128)}
    if layout == "bshd":
        shapes = {n: (a, c, b, d) for n, (a, b, c, d) in shapes.items()}
    dtypes = {"q": BFLOAT16, "out": BFLOAT16}
    arrays = {n: array(i, s, dtypes.get(n, cache)) for i, (n, s) in enumerate(shapes.items(), 1)}
    arrays |= {"cache_seqlens": array(10, (4,), np.int32), "block_table": array(11, (4, 100), np.int32)}
    if fp8:
        arrays |= {n: array(i, (8,), np.float32) for i, n in ((12, "k_scale"), (13, "v_scale"))}
    return arrays
