"""Workspaces of kernels: who shares one, who takes turns on it. No GPU: nothing is allocated there."""

from __future__ import annotations

import contextlib
import ctypes
import time
from types import SimpleNamespace

import numpy as np
import pytest
from decode_kernel_support import H200, merged_by_a_launch, operands_of, plan_of
from decode_support import make_case
from support import forward_operands, in_threads

from cufa.plan.planner import make_plan
from cufa.problem.mask import FULL
from cufa.problem.problem import Problem

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")


class Stream:
    """One of CuPy's, as far as workspaces look at it."""

    current: Stream

    def __init__(self, ptr: int = 1000, capture: int | None = None, **_: object) -> None:
        self.ptr, self.capture, self.synchronized = ptr, capture, 0

    def is_capturing(self):
        return self.capture is not None

    def synchronize(self):
        self.synchronized += 1

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before


@pytest.fixture
def capture_of():
    """The true one."""
    from cufa.run.cuda import workspace as workspaces

    return workspaces.capture_of


@pytest.fixture
def allocated(monkeypatch, capture_of):
    """Sizes of what was allocated, and the streams that were current."""
    from cufa.run.cuda import workspace as workspaces

    log = []

    def alloc(size):
        log.append((size, Stream.current))
        zero = lambda value, count, stream: log.append(("zero", count, stream))  # noqa: E731
        return SimpleNamespace(ptr=len(log) << 20, memset_async=zero)

    monkeypatch.setattr(Stream, "current", Stream(0), raising=False)
    monkeypatch.setattr(cp.cuda, "alloc", alloc)
    monkeypatch.setattr(cp.cuda, "Stream", Stream)
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda device_id=-1: Stream.current)
    monkeypatch.setattr(workspaces, "capture_of", lambda ptr: (Stream.current.capture, 0))
    for name in ("_zeroing", "_stream_workspaces", "_capture_workspaces"):
        monkeypatch.setattr(workspaces, name, {})
    monkeypatch.setattr(workspaces, "_call_workspaces", [])
    return log


def reserve(stream, counters=8, size=4096):
    from cufa.run.cuda.workspace import workspace_of

    with stream:
        workspace = workspace_of(stream, 0)
        if workspace.num_counters < counters or workspace.partial_bytes < size:
            workspace.grow(stream, 0, counters, size)
        return workspace.counters, workspace.partial


def test_one_workspace_a_stream_grown_when_it_is_too_small(allocated):
    one, other = Stream(7), Stream(8)
    first = reserve(one)
    assert reserve(one) == reserve(one, 3, 100) == first != reserve(other)
    assert [x for x in allocated if x[0] == "zero"] == [("zero", 32, one), ("zero", 32, other)]
    grown = reserve(one, 9, 100)
    assert grown != first and reserve(one) == grown, "no smaller in bytes"
    assert {stream for _, *_, stream in allocated} == {one, other}


def test_one_workspace_a_capture_and_stream(allocated):
    """Calls captured on one stream follow one another; those on another stream of that capture may not."""
    one, other = Stream(7, capture=1), Stream(8, capture=1)
    outside = reserve(Stream(7))
    first, second = reserve(one), reserve(other)
    assert reserve(one) == first and reserve(other) == second
    later = reserve(Stream(7, capture=2))
    assert len({outside, first, second, later}) == 4
    assert reserve(one, 8, 9999) != first and reserve(one) != first


def test_memory_of_a_capture_is_kept_as_it_grows(allocated):
    """Graphs hold addresses only."""
    from cufa.run.cuda import workspace as workspaces

    stream = Stream(7, capture=1)
    addresses = [reserve(stream, 8, size) for size in (100, 200, 300)]
    (workspace,) = workspaces._capture_workspaces.values()
    kept = [x.ptr for x in workspace._memory]
    assert kept == [address for pair in addresses for address in pair]


class Driver:
    """CUDA's, as far as it tells of captures and keeps an object for a graph."""

    def __init__(self, **fails):
        self.fails, self.number, self.graphs = fails, 0, {}

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, *none):
        status._obj.value, number._obj.value = 1, self.number
        graph._obj.value = 1000 + self.number
        return 0

    def cuUserObjectCreate(self, holder, argument, function, count, flags):
        assert (count, flags) == (1, 1)
        holder._obj.value = 77
        self.made = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value), argument.value
        return self.fails.get("create", 0)

    def cuGraphRetainUserObject(self, graph, holder, count, flags):
        assert (holder.value, count, flags) == (77, 1, 1)
        self.graphs.setdefault(graph.value, []).append(self.made)
        return self.fails.get("retain", 0)

    def destroy(self, graph):
        """As the driver does it, which calls what each object of the graph names."""
        for function, argument in self.graphs.pop(graph):
            function(argument)


@pytest.fixture
def driver(allocated, monkeypatch, capture_of):
    from cufa.run.cuda import workspace as workspaces

    found = Driver()
    monkeypatch.setattr(workspaces, "_driver", lambda: found)
    monkeypatch.setattr(workspaces, "capture_of", capture_of)
    return found


def capture(driver, number, *streams):
    """Captures a call on each stream; numbers of the captures that workspaces are kept of."""
    from cufa.run.cuda import workspace as workspaces

    driver.number = number
    for stream in streams:
        reserve(Stream(stream, capture=number))
    return sorted(key[-1] for key in workspaces._capture_workspaces)


def test_memory_of_a_capture_goes_when_the_graph_does(driver):
    """At the next capture, on whatever stream; not before, whatever else is captured."""
    assert capture(driver, 1, 7, 8) == [1, 1]
    assert capture(driver, 2, 7) == [1, 1, 2]
    driver.destroy(1001)
    assert capture(driver, 2, 7) == [1, 1, 2], "no search where nothing new is captured"
    assert capture(driver, 3, 7) == [2, 3]
    assert capture(driver, 4, 7) == [2, 3, 4]
    driver.destroy(1003)
    driver.destroy(1002)
    assert capture(driver, 5, 7) == [4, 5]


@pytest.mark.parametrize("fails", [{"create": 801}, {"retain": 1}])
def test_memory_is_kept_where_the_driver_does_not_tell_the_end(driver, fails):
    driver.fails = fails
    assert capture(driver, 1, 7) == [1]
    assert capture(driver, 2, 7) == [1, 2]


def test_memory_of_a_capture_is_allocated_and_zeroed_outside(allocated):
    """Neither captured nor from the pool of the stream, where kernels queued before may still write to it."""
    stream = Stream(7, capture=1)
    reserve(stream)
    (apart,) = {stream for _, *_, stream in allocated}
    assert apart is not stream and apart.synchronized and not apart.is_capturing()


def test_a_capture_in_any_mode_lets_memory_be_allocated(allocated, monkeypatch):
    """PyTorch captures in the mode "global" (0), in which cudaMalloc fails unless the thread's mode is relaxed (2)."""
    from cufa.run.cuda import workspace as workspaces

    modes, during, alloc = [0], [], cp.cuda.alloc

    def exchange(mode):
        modes[0], mode._obj.value = mode._obj.value, modes[0]

    monkeypatch.setattr(cp.cuda, "alloc", lambda size: during.append(modes[0]) or alloc(size))
    monkeypatch.setattr(
        workspaces, "_driver", lambda: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    )
    reserve(Stream(7, capture=1))
    assert set(during) == {2} and modes == [0]


def test_without_the_captures_number_each_call_has_its_own(allocated, monkeypatch):
    from cufa.run.cuda import workspace as workspaces

    monkeypatch.setattr(workspaces, "capture_of", lambda ptr: None)
    stream = Stream(7, capture=1)
    assert reserve(stream) != reserve(stream)


def test_no_driver_knows_no_capture(monkeypatch):
    from cufa.run.cuda import workspace as workspaces

    def missing():
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(workspaces, "_driver", missing)
    assert workspaces.capture_of(7) is None
    assert not workspaces.Workspace(captured=True, graph=1).ended


def test_launches_of_two_threads_on_one_stream_do_not_mix(allocated, monkeypatch):
    """Each merges in a second launch: split_a, split_b, combine_a would merge b's parts into a's result."""
    from cufa.run.cuda import backend as cuda

    log = []

    class Launches:
        def __init__(self, prepared, parameters):
            self.name = prepared.name

        def __call__(self, stream):
            for step in ("split", "combine"):
                log.append((self.name, step))
                time.sleep(0.005)

    monkeypatch.setattr(cuda, "Launches", Launches)
    monkeypatch.setattr(cuda.Graphs, "__call__", lambda self, stream, version: self._plainly(stream))
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    bindings = []
    for length in (500, 900):
        case = make_case([length], head_dim=64)
        plan = plan_of(case, "decode_split", 4)
        plan = plan_of(case, "decode_split", 4, merged_by_a_launch(plan.config), H200)
        assert len(plan.launches) == 2 and plan.workspace
        prepared = SimpleNamespace(plan=plan, device_id=0, name=length)
        bindings.append(cuda.Binding(prepared, operands_of(case)))
    in_threads(lambda i: [bindings[i].launch(range(1, 12)) for _ in range(5)], 2)
    assert len(log) == 20
    for (first, step), second in zip(log[::2], log[1::2], strict=True):
        assert step == "split" and second == (first, "combine"), log


@pytest.fixture
def naive(allocated, monkeypatch):
    """A call whose kernel has a workspace without counters, and the addresses of it that were launched."""
    from cufa.run.cuda import backend as cuda

    used = []

    def launch(stream, version=None):
        used.append(binding._params.workspace)

    monkeypatch.setattr(cuda, "Launches", lambda *_: launch)
    monkeypatch.setattr(cuda.Graphs, "__call__", lambda self, *which: launch(*which))
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    problem = Problem(1, 2, 2, 100, 100, 64, "float16", FULL, 0.125)
    q = np.zeros((1, 2, 100, 64), np.float16)
    plan = make_plan(problem, H200, "naive")
    binding = cuda.Binding(SimpleNamespace(plan=plan, device_id=0), forward_operands(q, q, q))
    return binding, used


def test_a_workspace_without_counters_is_of_the_call(naive, allocated):
    binding, used = naive
    for _ in range(2):
        binding.launch([1, 2, 3, 4, 0])
    assert len(set(used)) == len(allocated) == 2 and allocated[0][0] == binding.prepared.plan.workspace > 0


def test_in_a_capture_it_is_of_the_graph(naive, allocated):
    from cufa.run.cuda import workspace as workspaces

    binding, used = naive
    with Stream(7, capture=1):
        for _ in range(2):
            binding.launch([1, 2, 3, 4, 0])
    (workspace,) = workspaces._capture_workspaces.values()
    assert used == [workspace.partial] * 2 and workspace.partial_bytes == binding.prepared.plan.workspace


def test_a_launch_keeps_no_list_of_its_callers(naive):
    binding, _ = naive
    addresses = [1, 2, 3, 4, 0]
    binding.launch(addresses)
    addresses[0] = 5
    binding.launch(addresses)
    assert binding._params.q == 5


def test_every_launch_is_on_the_stream_it_is_given(monkeypatch):
    """Configurations keep the stream of the last launch."""
    from cufa.run.cuda import backend as cuda
    from cufa.run.cuda import launches as launches_

    case, log = make_case([500], head_dim=64), []
    plan = plan_of(case, "decode_split", 4)
    plan = plan_of(case, "decode_split", 4, merged_by_a_launch(plan.config), H200)

    def launch(config, function, arguments, extra):
        log.append(config._obj.stream or 0)
        return 0

    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    prepared = SimpleNamespace(plan=plan, device_id=0, functions={x.entry: function for x in plan.launches})
    monkeypatch.setattr(launches_, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(cp.cuda, "Device", lambda device_id: contextlib.nullcontext())
    launches = cuda.Launches(prepared, [1])
    for stream in (0, 7, 7, 0, 9):
        launches(stream)
    assert log == [0, 0, 7, 7, 7, 7, 0, 0, 9, 9]


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_captured_reads_of_a_mask_lives_as_long(captured):
    """And only once of each array, however many launches read it."""
    from cufa.run.cuda.workspace import Workspace

    arrays = [np.zeros(3), np.zeros(3)]
    workspace = Workspace(captured)
    for _ in range(3):
        workspace.keep(arrays)
    assert len(workspace._memory) == 2 * captured


def test_a_binding_keeps_what_kernels_read_of_its_mask(allocated, monkeypatch):
    """Its vectors, and the order of its query blocks: behind a launch, whoever drops the binding, and for a graph."""
    from cufa import masks
    from cufa.run.cuda import backend as cuda
    from cufa.run.cuda import mask_uploads
    from cufa.run.cuda import workspace as workspaces

    monkeypatch.setattr(cuda, "Launches", lambda *_: lambda stream, version=None: None)
    monkeypatch.setattr(cuda.Graphs, "serve", lambda plan: False)
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(
        mask_uploads,
        "_copy",
        lambda numbers, _: SimpleNamespace(data=SimpleNamespace(ptr=id(numbers)), of=numbers),
    )
    monkeypatch.setattr(mask_uploads, "in_flight", type(mask_uploads.in_flight)(maxlen=2))
    monkeypatch.setattr(
        cuda.Binding, "_map", lambda self, *_: SimpleNamespace(address=0, point_to=lambda at: None)
    )
    begin = np.arange(1200, dtype=np.int32) % 600
    mask = masks.columns(begin, begin + 600)
    problem = Problem(1, 2, 2, 1200, 1200, 64, "float16", mask, 0.125)
    q = np.zeros((1, 2, 1200, 64), np.float16)
    plan = make_plan(problem, H200, "fa3")
    binding = cuda.Binding(SimpleNamespace(plan=plan, device_id=0), forward_operands(q, q, q))
    assert plan.block_order is not None and binding._params.block_order == id(plan.block_order)
    read = {id(x.of) for x in binding._mask_arrays}
    assert id(plan.block_order) in read and len(read) == 2
    for _ in range(3):
        binding.launch([16, 32, 48, 64, 0])
    assert [{id(x.of) for x in arrays} for arrays in mask_uploads.in_flight] == [read] * 2
    with Stream(7, capture=1):
        binding.launch([16, 32, 48, 64, 0])
    (workspace,) = workspaces._capture_workspaces.values()
    assert {id(x.of) for x in workspace._memory if hasattr(x, "of")} == read
