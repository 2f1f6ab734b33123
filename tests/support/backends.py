"""The three backends that a contract runs on: the same call computed by NumPy ("cpu"), by kernels executed on this CPU
("emulate") and by a GPU ("gpu").

A test takes the parameters ``backend``, ``spec``, ``dtype`` and ``precision`` from :func:`contract`, which also says
which backend has which sizes. The mark of a backend decides where its cases run and how they are sampled
(``conftest.py``).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decode_support import Case, prepare
from support import DTYPES, on_blocks

import cufa
from cufa.calls.call import BackwardCall, ForwardCall, PackedBackward, PackedForward
from cufa.calls.dispatch import with_memory
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, kernels_of
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import Plan, make_plan
from cufa.problem.options import Options, resolve_mask
from cufa.run.cpu.run import run_on_cpu
from cufa.run.emulate.calls import Execution, run_plan

#: (call, public function, results) by operation and by whether sequences are packed.
CALLS = {
    ("forward", False): (ForwardCall, cufa.flash_attention, ("out", "lse")),
    ("forward", True): (PackedForward, cufa.flash_attention_varlen, ("out", "lse")),
    ("backward", False): (BackwardCall, cufa.flash_attention_backward, ("dq", "dk", "dv", "dsink")),
    ("backward", True): (PackedBackward, cufa.flash_attention_varlen_backward, ("dq", "dk", "dv", "dsink")),
}
OPTIONAL = ("alibi_slopes", "sink", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")
OPTIONAL += "cache_seqlens", "block_table", "k_new", "v_new"


@dataclasses.dataclass
class Done:
    """What a call gave, on the host."""

    results: dict[str, np.ndarray]
    plan: Plan | None = None
    """None after the public call, which makes its own."""
    records: np.ndarray | None = None
    """Of a traced run: the tiles that each thread block visited."""

    @property
    def out(self) -> np.ndarray:
        return self.results["out"]

    @property
    def lse(self) -> np.ndarray:
        return self.results["lse"]

    @property
    def gradients(self) -> list[np.ndarray]:
        return [self.results[name] for name in ("dq", "dk", "dv")]


class Backend:
    """A call goes through cufa's public function. With ``config``, ``blocks``, ``trace`` or ``execution`` it goes
    through a plan: for these tiles, for this number of persistent blocks, with these settings of the executor."""

    name = "cpu"
    device: Device | None = None
    call_device: str | None = "cpu"
    """``device`` of public calls."""

    def __repr__(self) -> str:
        return self.name

    def array(self, x: Any) -> Any:
        """A NumPy array where the backend computes."""
        return x

    def host(self, x: Any) -> np.ndarray:
        return x

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """NaN by its bits, so that what is never written shows."""
        dtype = np.dtype(dtype)
        return self.array(np.full(shape, -1, f"i{dtype.itemsize}").view(dtype))

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Done:
        """``options``: of the public call, and those above; ``place`` puts each array, results too, into memory."""
        return self._call("forward", {"q": q, "k": k, "v": v}, **options)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Done:
        names = ("dout", "q", "k", "v", "out", "lse", "dlse")
        given = dout, q, k, v, out, lse, options.pop("dlse", None)
        return self._call("backward", dict(zip(names, given, strict=True)), **options)

    def decode(
        self, case: Case, kernel: str | None = None, num_splits: int | None = None, *, config: Any = None,
        layout: str = "bhsd", trace: bool = False, execution: Execution | None = None, launches: int = 1,
        arch: str | None = None, algorithm: str = "auto",
    ) -> Done:  # fmt: skip
        """By a plan; the results have the caches, too, axes in canonical order."""
        device = self.device if arch is None else Device.typical(arch)
        problem, operands = prepare(case, layout, on_gpu=self.name != "cpu", place=self.array)
        plan = make_plan(problem, device, algorithm, config, num_splits=num_splits, kernel=kernel)
        records = self.run(plan, operands, trace, execution, launches)
        norms = ["key_norms"] * (operands.get("key_norms") is not None)
        names = ("out", "lse", "k_cache", "v_cache", *["k_scale", "v_scale"] * case.fine, *norms)
        return Done({name: self.host(operands[name]) for name in names}, plan, records)

    def _call(
        self, operation: str, inputs: dict[str, Any], place: Callable[[Any], Any] = lambda x: x,
        config: Any = None, blocks: int | None = None, trace: bool = False, execution: Execution | None = None,
        arch: str | None = None, **options: Any,
    ) -> Done:  # fmt: skip
        kind, function, names = CALLS[operation, "cu_seqlens_q" in options]
        per_row = ("lse", "dlse")
        inputs = {
            name: x if x is None else self.array(x) if name in per_row else self._placed(place, self.array(x))
            for name, x in inputs.items()
        }
        arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
        if getattr(options.get("mask"), "reads_lengths", False):  # the host makes bits from them
            arrays = {name: x for name, x in arrays.items() if "seqlens" not in name}
        options |= {name: self.array(x) for name, x in arrays.items()}
        shapes = {f"d{name}": inputs[name].shape for name in "qkv"}
        shapes["out"] = *inputs["q"].shape[:-1], inputs["v"].shape[-1]
        results = {
            name: self._placed(place, self.poisoned(shapes[name], inputs["q"].dtype))
            for name in ("out", "dq", "dk", "dv")
            if name in names
        }
        if self.name != "emulate" and not (config or blocks or trace or execution):
            dlse = {} if inputs.get("dlse") is None else {"dlse": inputs["dlse"]}
            positional = [x for name, x in inputs.items() if name != "dlse"]
            more = {"return_lse": True} if operation == "forward" else {}
            found = function(*positional, **results, **dlse, **more, **options, device=self.call_device)
            assert all(x is results[name] for name, x in zip(names, found, strict=False) if name in results)
            return Done({name: self.host(x) for name, x in zip(names, found, strict=False)})
        call = self._read(kind, inputs, results, options)
        call, problem = call.check(on_gpu=self.name != "cpu")
        results = call.allocate(problem, self.poisoned)
        given = call.arrays(results)
        problem = problem if self.name == "cpu" else with_memory(problem, given)
        asked = call.options
        device = self.device if arch is None else Device.typical(arch)
        plan = make_plan(problem, device, asked.algorithm, config, num_splits=asked.num_splits)
        plan = plan if blocks is None else on_blocks(plan, blocks)
        records = self.run(plan, given, trace, execution)
        return Done({name: self.host(x) for name, x in results.items()}, plan, records)

    def _read(
        self, kind: Any, inputs: dict[str, Any], results: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        optional = {name: options.pop(name) for name in OPTIONAL if name in options}
        mask = resolve_mask(*(options.pop(name, default) for name, default in _MASKS))
        options |= {"layout": "bshd"} if "cu_seqlens_q" in optional else {}
        wanted = (
            [*results, "lse"] if kind.name == "forward" else [*results, *["dsink"] * ("sink" in optional)]
        )
        operation = OPERATIONS[kind.name]
        named = {**inputs, **results, **optional}
        operands = operation.all_operands if optional else operation.operands
        return kind.read([named.get(x.name) for x in operands], wanted, Options(mask, **options))

    def _placed(self, place: Callable[[Any], Any], x: Any) -> Any:
        return place(x)

    def run(
        self, plan: Plan, given: dict[str, Any], trace: bool, execution: Execution | None, launches: int = 1
    ) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_on_cpu(plan, given)


class Executor(Backend):
    """Kernels run on this CPU in checked mode, for a typical H200: a finding is a failure."""

    name = "emulate"
    device = Device.typical("sm_90")

    def run(
        self, plan: Plan, given: dict[str, Any], trace: bool, execution: Execution | None, launches: int = 1
    ) -> Any:
        done = run_plan(plan, given, execution or Execution("checked"), trace, launches=launches)
        assert not done.findings, "\n".join(map(str, done.findings))
        return done.records


class Gpu(Backend):
    name = "gpu"
    call_device = None

    @property
    def device(self) -> Device:  # type: ignore[override]
        from cufa.run.cuda import backend as cuda

        return cuda.current_device()

    def array(self, x: Any) -> Any:
        import cupy

        return cupy.asarray(x)

    def host(self, x: Any) -> np.ndarray:
        return x.get()

    def _placed(self, place: Callable[[Any], Any], x: Any) -> Any:
        """By bits, as bfloat16 may have no arithmetic."""
        return place(x.view(f"i{x.itemsize}")).view(x.dtype)

    def run(
        self, plan: Plan, given: dict[str, Any], trace: bool, execution: Execution | None, launches: int = 1
    ) -> Any:
        from cufa.run.cuda import backend as cuda

        for _ in range(launches - trace):
            cuda.run(plan, given)
        return cuda.trace(plan, given) if trace else None


CPU, EMULATE, GPU = Backend(), Executor(), Gpu()
MARKS: dict[str, Any] = {"cpu": (), "emulate": pytest.mark.emulate, "gpu": pytest.mark.gpu}
_MASKS = (("causal", False), ("window", None), ("mask", None))

Variant = tuple[Backend, Kernel, str, str | None]


def variants(backend: Backend, operation: str = "forward") -> list[Variant]:
    """What a backend serves: each kernel with each dtype, and precision of float32; NumPy has one kernel per
    algorithm, each in every dtype."""
    kernels = list(kernels_of(operation).values())
    if backend is CPU:
        of_algorithm = {spec.algorithm: spec for spec in reversed(kernels)}
        return [(backend, spec, dtype, None) for spec in reversed(of_algorithm.values()) for dtype in DTYPES]
    return [
        (backend, spec, dtype, None if precision == "native" else precision)
        for spec in kernels
        for dtype in spec.dtypes
        if dtype != "float8_e4m3"  # test_float8.py, test_float8_kernels.py
        for precision in spec.precisions
        if (precision == "native") == (dtype != "float32")
    ]


def contract(
    names: str = "",
    operation: str = "forward",
    serves: Callable[..., bool] = lambda *case: True,
    **sizes: Any,
) -> pytest.MarkDecorator:
    """Parametrise over ``backend, spec, dtype, precision`` and ``names``: each variant of each backend in ``sizes``
    (cpu=…, emulate=…, gpu=…) with each of its values, a tuple where there are several names, or True where there is
    none. ``serves``: which of these cases there are."""
    more = names.replace(",", " ").split()
    cases = []
    for name, values in sizes.items():
        backend = {"cpu": CPU, "emulate": EMULATE, "gpu": GPU}[name]
        rows = [()] if values is True else [x if len(more) > 1 else (x,) for x in values]
        cases += [
            pytest.param(*variant, *row, id="-".join(map(_id, (*variant, *row))), marks=MARKS[name])
            for variant in variants(backend, operation)
            for row in rows
            if serves(*variant, *row)
        ]
    return pytest.mark.parametrize(("backend", "spec", "dtype", "precision", *more), cases)


def _id(value: Any) -> str:
    return "native" if value is None else str(getattr(value, "name", value)).replace("-", "−")


def backends(*names: str) -> pytest.MarkDecorator:
    """Parametrise over ``backend`` alone."""
    known = {"cpu": CPU, "emulate": EMULATE, "gpu": GPU}
    return pytest.mark.parametrize(
        "backend", [pytest.param(known[name], id=name, marks=MARKS[name]) for name in names]
    )
