"""Where probes run: on a GPU, and on this CPU through the host twins."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import probes

from cufa.build import compiler

_ENTRY = re.compile(r"\b(probe_\w+)\(const __grid_constant__")
_DEFAULT_SHARED_LIMIT = 48 * 1024


def on_cpu(probe: probes.Probe, **options) -> np.ndarray:
    """In checked mode; ``options`` are those of :class:`cufa.run.emulate.launch.Execution`; findings fail."""
    from cufa.kernels import Launch
    from cufa.run.emulate import build as host_build
    from cufa.run.emulate.calls import Execution
    from cufa.run.emulate.launch import execute
    from cufa.run.emulate.memory import GlobalArray, tensor_map

    stores = probe.output_tensor is not None
    types = ["ProbeParams", *["TensorMap"] * (3 if stores else len(probe.tensors))]
    names = _ENTRY.findall((compiler.SOURCE_DIR / probe.source).read_text(encoding="utf-8"))
    entries = host_build.kernel(probe.source, dict(probe.constants), names, True, types)
    source, out = probe.inputs.copy(), np.zeros(probe.outputs, np.uint32)
    params = probes.ProbeParams(source.ctypes.data, out.ctypes.data)
    memory = [GlobalArray("in", source, writable=False), GlobalArray("out", out, writable=True)]
    memory += [GlobalArray(f"tensor {i}", x, writable=False) for i, (x, _) in enumerate(probe.tensors)]
    maps = [tensor_map(x, rows) for x, rows in probe.tensors]
    if probe.output_tensor is not None:
        shape, rows = probe.output_tensor
        maps = [tensor_map(out.view(np.float16).reshape(shape), rows)] * 3
    launch = Launch(
        probe.entry, (probe.blocks, 1, 1), probe.threads, probe.shared_bytes, cluster=probe.cluster
    )
    _, findings = execute(
        entries[probe.entry], launch, [params, *maps], memory, Execution("checked", **options)
    )
    assert not findings, "\n".join(map(str, findings))
    return out


def runs_on_gpu(probe: probes.Probe) -> bool:
    """Whether CuPy's current device has the probe's instructions. Hopper's own exist on no other."""
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    return capability == 90 if probe.capability == 90 else capability >= probe.capability


def on_gpu(probe: probes.Probe) -> np.ndarray:
    """On CuPy's current device."""
    import cupy

    unit = compiler.translation_unit(probe.source, dict(probe.constants))
    module = cupy.RawModule(code=unit, options=compiler.cupy_options(probe.capability))
    kernel = module.get_function(probe.entry)
    if probe.shared_bytes > _DEFAULT_SHARED_LIMIT:
        kernel.max_dynamic_shared_size_bytes = probe.shared_bytes
    source, out = cupy.asarray(probe.inputs), cupy.zeros(probe.outputs, cupy.uint32)
    params = np.zeros(1, [("in", np.uint64), ("out", np.uint64)])
    params["in"], params["out"] = source.data.ptr, out.data.ptr
    on_device = [cupy.asarray(x) for x, _ in probe.tensors]
    boxes = [rows for _, rows in probe.tensors]
    maps = [_tensor_map(x, rows) for x, rows in zip(on_device, boxes, strict=True)]
    if probe.output_tensor is not None:
        shape, rows = probe.output_tensor
        maps = [_tensor_map(out.view(np.float16).reshape(shape), rows)] * 3
    kernel((probe.blocks,), (probe.threads,), (params, *maps), shared_mem=probe.shared_bytes)
    return out.get()


def _tensor_map(x, box_rows: int) -> np.ndarray:
    from cufa.kernels import Box
    from cufa.problem.element import ELEMENTS
    from cufa.run.cuda.tensor_map import TensorMap

    encoded = TensorMap(ELEMENTS[str(x.dtype)], x.shape, x.strides, Box(box_rows))
    encoded.point_to(x.data.ptr)
    return np.frombuffer(ctypes.string_at(encoded.address, 128), [("bytes", np.uint8, 128)])
