"""Ctrl-C at every line of a launch: the next call on any arrays and stream launches what it was given. On a driver that
writes down what kernels would read."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from decode_kernel_support import H200
from interrupts import was_interrupted

import cufa
from cufa.plan.planner import make_plan
from cufa.problem.mask import FULL
from cufa.problem.problem import Problem

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")


class Machine:
    """The driver, the pool and the current stream, as far as a launch looks at them."""

    def __init__(self):
        self.stream, self.memory, self.found, self.of_graph = 0, 1 << 40, [], b""
        self.read = lambda: b""

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        self.found.append((config._obj.stream or 0, self.read()))
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, kernel):
        self.of_graph = self.read()
        return 0

    def cuGraphLaunch(self, executable, stream):
        self.found.append((stream.value or 0, self.of_graph))
        return 0

    def cuTensorMapEncodeTiled(self, address, kind, rank, pointer, *geometry):
        return self.cuTensorMapReplaceAddress(address.value, pointer.value)

    def cuTensorMapReplaceAddress(self, address, pointer):
        ctypes.c_uint64.from_address(address).value = pointer
        return 0

    def __getattr__(self, name):
        assert name.startswith("cuGraph"), name
        return lambda *_: 0


def bound(monkeypatch, machine, which):
    """A binding that launches on ``machine``: "operation algorithm"."""
    from cufa.run.cuda import backend, launches, tensor_map

    operation, algorithm = which.split()
    for module in (launches, tensor_map):
        monkeypatch.setattr(module, "_driver", lambda: machine)
    current = lambda *_: SimpleNamespace(ptr=machine.stream, is_capturing=lambda: False)  # noqa: E731
    monkeypatch.setattr(cp.cuda, "alloc", lambda size: SimpleNamespace(ptr=machine.memory))
    monkeypatch.setattr(cp.cuda, "get_current_stream", current)
    monkeypatch.setattr(cp.cuda, "Device", lambda device_id: contextlib.nullcontext())
    problem = Problem(1, 2, 2, 100, 100, 64, "float16", FULL, 0.125, operation=operation)
    if algorithm == "fp8":
        of_e4m3 = cufa.plan((1, 2, 100, 64), dtype="float8_e4m3", device="sm_90").problem
        problem, algorithm = dataclasses.replace(of_e4m3, values_in_rows=True), "fa3"
    plan = make_plan(problem, H200, algorithm)
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    prepared = SimpleNamespace(plan=plan, device_id=0, functions={x.entry: function for x in plan.launches})
    x = np.zeros((1, 2, 100, 64), np.float16)
    given = {operand.name: x if operand.stride else x[..., 0] for operand in plan.operation.operands}
    return backend.Binding(prepared, given), plan, given


@pytest.mark.parametrize(
    "which", ["forward fa3", "forward fp8", "backward fa2", "backward fa3", "forward naive"]
)
def test_every_operand_has_its_own_pointer(monkeypatch, which):
    """Structures lack some of the optional operands."""
    machine = Machine()
    machine.stream, machine.memory = 7, 1 << 40
    binding, plan, _ = bound(monkeypatch, machine, which)
    operands = plan.operation.all_operands
    binding.launch_here([(n + 1) << 20 for n in range(len(operands))])
    there = [n for n, x in enumerate(operands) if x.field in plan.params.names]
    assert len(there) >= 6
    for n in there:
        assert getattr(binding._params, operands[n].field) == (n + 1) << 20, operands[n].name


@pytest.mark.parametrize(
    "which", ["forward fa3", "forward fp8", "backward fa2", "backward fa3", "forward naive"]
)
def test_the_next_call_launches_what_it_is_given(monkeypatch, which):
    """fa3: tensor maps; fp8: of its workspace, too; fa2's backward: a graph and a workspace; naive: a workspace."""
    machine = Machine()
    binding, plan, given = bound(monkeypatch, machine, which)
    maps = [m.address for m in (*(m for _, m in binding._maps), *binding._workspace_maps)]
    machine.read = lambda: (bytes(binding._params), *(ctypes.string_at(x, 8) for x in maps))

    def call(arrays, block=None):
        """Two sets of arrays, each with a stream of its own; any block of the pool for the workspace."""
        machine.stream, machine.memory = 7 + arrays, (1 + (arrays if block is None else block)) << 40
        machine.found.clear()
        binding.launch_here([(n + 10 * arrays) << 20 for n in range(1, len(given) + 1)])
        return list(machine.found)

    after = [(0, 1), (0, 2), (1, 1), (0, 0)]
    call(0), call(1)  # launched plainly; from the second call of a stream on as a graph, where there is one
    right = {x: call(*x) for x in after}
    assert len({str(x) for x in right.values()}) == (4 if plan.workspace else 2)
    for interrupted, first in itertools.product([(1, 1), (0, 1)], range(len(after))):
        for at in itertools.count():
            call(0)
            if not was_interrupted(lambda: call(*interrupted), at, "/run/cuda/"):  # noqa: B023
                break
            for x in after[first:] + after[:first]:
                assert call(*x) == right[x], f"{interrupted} interrupted at line {at}, then {x}"
        assert at > 6
