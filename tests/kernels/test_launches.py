"""Launches as a CUDA graph, and of a kernel beside plans, on a driver that only writes down what it is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL
from cufa.problem.problem import Problem

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")
from cufa.run.cuda import launches  # noqa: E402

PLAN = make_plan(
    Problem(1, 2, 2, 100, 100, 64, "float16", CAUSAL, 0.125, operation="backward"), Device.typical("sm_90")
)


class Driver:
    """Hands out numbers for handles; ``status`` has what a function answers instead of success."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.status: dict[str, int] = {}
        self.handles = 0

    def _make(self, name, handle) -> int:
        self.handles += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = self.handles
        return self._done(name, self.handles)

    def _done(self, name, what) -> int:
        if self.status.get(name):
            return self.status[name]
        self.log.append((name, what))
        return 0

    def cuGraphCreate(self, graph, flags):
        return self._make("create", graph)

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, kernel):
        return self._make("add", node)

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        return self._make("instantiate", executable)

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, kernel):
        return self._done("set", executable.value)

    def cuGraphLaunch(self, executable, stream):
        return self._done("launch", stream.value or 0)

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        """Writes down the blocks and the stream, and what the kernel would read."""
        values = [ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))[0] for address in arguments]
        asked = config._obj
        return self._done("kernel", (function.value, list(asked.sizes), asked.stream, values))

    def cuGraphExecDestroy(self, executable):
        return self._done("free", executable.value)

    def cuGraphDestroy(self, graph):
        return self._done("free", graph.value)


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(launches, "_driver", lambda: found)
    monkeypatch.setattr(cp.cuda, "Device", lambda device_id: contextlib.nullcontext())
    return found


@pytest.fixture
def graphs(driver):
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    prepared = SimpleNamespace(plan=PLAN, device_id=0, functions={x.entry: function for x in PLAN.launches})
    return launches.Graphs(prepared, [1], lambda stream: driver.log.append(("plain", stream)))


def names(driver: Driver) -> list[str]:
    found = [name for name, _ in driver.log]
    driver.log.clear()
    return found


MADE = ["create", "add", "add", "add", "instantiate"]
FILLED = ["set", "set", "set", "launch"]


def test_a_stream_gets_a_graph_with_its_second_call_and_new_arguments_are_filled_in(graphs, driver):
    """A stream's graph knows the arguments of its own last call only."""
    first, new, known = ["plain"], FILLED, ["launch"]
    calls = [(7, 1, first), (7, 1, MADE + FILLED), (9, 1, first), (9, 1, MADE + FILLED)]
    for stream, version, found in [*calls, (7, 1, known), (7, 2, new), (9, 2, new), (9, 2, known)]:
        graphs(stream, version)
        assert driver.log[-1] == (found[-1], stream) and names(driver) == found


@pytest.mark.parametrize("what", ["create", "add", "instantiate", "set", "launch"])
def test_what_the_driver_refuses_is_launched_plainly(graphs, driver, what):
    driver.status[what] = 801
    for _ in range(4):
        graphs(7, 1)
    found = names(driver)
    assert found.count("plain") == 4 and "launch" not in found
    driver.status.clear()
    graphs(7, 1)
    assert names(driver) == ["plain"]  # it is not asked again


def test_a_thread_without_a_context_is_served_plainly_once(graphs, driver):
    graphs(7, 1), graphs(7, 1), names(driver)
    driver.status["launch"] = launches.INVALID_CONTEXT
    graphs(7, 1)
    assert names(driver) == ["plain"]
    driver.status.clear()
    graphs(7, 1)
    assert names(driver) == ["launch"]


def test_graphs_of_many_streams_are_given_back(graphs, driver):
    for stream in range(2 * launches._MAX_STREAMS):
        graphs(stream, 1)
        graphs(stream, 1)
    assert names(driver).count("free") >= 2 * launches._MAX_STREAMS
    assert len(graphs._by_stream) <= launches._MAX_STREAMS


def test_what_overlaps_or_is_alone_is_no_graph():
    assert launches.Graphs.serve(PLAN)
    one = dataclasses.replace(PLAN, launches=PLAN.launches[:1])
    many = dataclasses.replace(PLAN, launches=PLAN.launches * 2)
    assert not launches.Graphs.serve(one) and not launches.Graphs.serve(many)
    for change in ({"dependent": True}, {"cluster": 2}):
        last = dataclasses.replace(PLAN.launches[-1], **change)
        other = dataclasses.replace(PLAN, launches=(*PLAN.launches[:-1], last))
        assert not launches.Graphs.serve(other)


@pytest.fixture
def of_numbers(driver, monkeypatch):
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda device_id: SimpleNamespace(ptr=70 + device_id))
    return launches.NumberKernel(SimpleNamespace(ptr=5), 3, 128, 2)


def test_a_kernel_of_numbers_is_launched_with_those_of_each_call(of_numbers, driver):
    of_numbers(9, [2**47, 0, -1])
    of_numbers(1, [1, 2, 3])
    sizes = [[blocks, 1, 1, 128, 1, 1, 0] for blocks in (9, 1)]
    assert driver.log == [
        ("kernel", (5, sizes[0], 72, [2**47, 0, -1])),
        ("kernel", (5, sizes[1], 72, [1, 2, 3])),
    ]


def test_a_kernel_of_numbers_makes_the_context_current_or_says_what_the_driver_says(
    of_numbers, driver, monkeypatch
):
    devices = []

    def set_device(device_id):
        devices.append(device_id)
        driver.status.clear()

    monkeypatch.setattr(cp.cuda.runtime, "setDevice", set_device)
    driver.status["kernel"] = launches.INVALID_CONTEXT
    of_numbers(1, [1, 2, 3])
    assert devices == [2] and names(driver) == ["kernel"]
    driver.status["kernel"] = 700
    monkeypatch.setattr(cp.cuda.driver, "CUDADriverError", RuntimeError)
    with pytest.raises(RuntimeError, match="700"):
        of_numbers(1, [1, 2, 3])
    assert names(driver) == []
