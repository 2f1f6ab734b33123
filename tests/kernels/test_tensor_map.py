"""Tensor maps as the driver is asked for them. No GPU: a driver that writes down what it is told."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from support import forward_operands

from cufa.gpu.architectures import Device
from cufa.kernels import Box
from cufa.plan.planner import make_plan
from cufa.problem.element import ELEMENTS
from cufa.problem.mask import FULL
from cufa.problem.problem import Problem

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")


class Driver:
    """Fails the first call of each function for which it has a status."""

    def __init__(self, **status):
        self.status, self.calls = status, []

    def cuTensorMapEncodeTiled(self, address, element, rank, pointer, *geometry):
        self.calls.append(("encode", address.value, pointer.value, [list(x) for x in geometry[:4]]))
        return self.status.pop("encode", 0)

    def cuTensorMapReplaceAddress(self, address, pointer):
        self.calls.append(("replace", address, pointer))
        return self.status.pop("replace", 0)


@pytest.fixture
def make(monkeypatch):
    """make(driver): a map of (3, 5, 300, 128) bfloat16, rows and heads interleaved."""
    from cufa.run.cuda import tensor_map

    def made(driver):
        monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
        strides = (384_000, 256, 1280, 2)
        return tensor_map.TensorMap(ELEMENTS["bfloat16"], (3, 5, 300, 128), strides, Box(64))

    return made


def test_a_map_is_encoded_once_and_then_given_addresses(make):
    driver = Driver()
    moving = make(driver)
    assert moving.address % 64 == 0
    before = ctypes.string_at(moving.address, 128)
    for pointer in (4096, 4096, 8192, 4096):
        moving.point_to(pointer)
    assert [x[:3] for x in driver.calls] == [
        ("encode", moving.address, 4096),
        ("replace", moving.address, 8192),
        ("replace", moving.address, 4096),
    ]
    assert ctypes.string_at(moving.address, 128) == before, "its bytes are the driver's business"
    sizes, strides, box, steps = driver.calls[0][3]
    assert (sizes, strides, box, steps) == (
        [128, 300, 5, 3],
        [1280, 256, 384_000],
        [64, 64, 1, 1],
        [1, 1, 1, 1],
    )


def test_a_map_whose_address_cannot_be_replaced_is_encoded_again(make):
    driver = Driver(replace=1)
    moving = make(driver)
    for pointer in (4096, 8192, 4096):
        moving.point_to(pointer)
    assert [x[0] for x in driver.calls] == ["encode", "replace", "encode", "replace"]


def test_a_map_that_cannot_be_encoded_says_so(make, monkeypatch):
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with CUDA error 1 at 0x1001"):
        make(Driver(encode=1)).point_to(4097)
    driver, current = Driver(encode=201), []
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 3)
    monkeypatch.setattr(cp.cuda.runtime, "setDevice", current.append)
    make(driver).point_to(4096)
    assert current == [3] and len(driver.calls) == 2, "once a context is current"


def test_a_call_points_only_the_maps_of_what_moved(monkeypatch):
    from cufa.run.cuda import backend as cuda
    from cufa.run.cuda import tensor_map

    driver, launched = Driver(), []
    monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
    monkeypatch.setattr(cuda, "Launches", lambda *_: launched.append)
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda device_id: SimpleNamespace(ptr=0))
    problem = Problem(1, 2, 2, 100, 100, 64, "float16", FULL, 0.125, positive_strides=True)
    plan = make_plan(problem, Device.typical("sm_90"), "fa3")
    q = np.zeros((1, 2, 100, 64), np.float16)
    binding = cuda.Binding(SimpleNamespace(plan=plan, device_id=0), forward_operands(q, q, q))
    told = []
    for addresses in ([16, 32, 48, 64, 0], [16, 32, 48, 64, 0], [16, 32, 80, 64, 0], [96, 32, 80, 112, 0]):
        driver.calls.clear()
        binding.launch(addresses)
        told.append([x[2] for x in driver.calls])
    assert sorted(told[0]) == [16, 32, 48, 64] and told[1:] == [[], [80], [96, 112]]
    assert len(launched) == 4
