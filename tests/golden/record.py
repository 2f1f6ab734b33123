"""Record golden vectors on a GPU: ``python tests/golden/record.py`` writes ``golden.npz`` beside itself.

Every primitive's results for fixed bits, and every kernel's results for tiny shapes. Needs CuPy and a GPU; prints
what it wrote. The host twins are then tested against the file wherever there is no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import cupy
import numpy as np
import probes

import cufa
from cufa import compiler

PATH = Path(__file__).parent / "golden.npz"


def record_probes() -> dict[str, np.ndarray]:
    unit = compiler.translation_unit(probes.SOURCE, {})
    module = cupy.RawModule(code=unit, options=compiler.cupy_options())
    results = {}
    for probe in probes.probes():
        source, out = cupy.asarray(probe.inputs), cupy.zeros(probe.outputs, cupy.uint32)
        params = np.zeros(1, [("in", np.uint64), ("out", np.uint64)])
        params["in"], params["out"] = source.data.ptr, out.data.ptr
        kernel = module.get_function(probe.entry)
        kernel((probe.blocks,), (probe.threads,), (params,), shared_mem=probes.SHARED_BYTES)
        results[f"probe/{probe.name}"] = out.get()
    return results


def record_attention() -> dict[str, np.ndarray]:
    results = {}
    for case in probes.cases():
        q, k, v = (cupy.asarray(x) for x in case.inputs())
        out, lse = cufa.flash_attention(
            q, k, v, causal=case.causal, algorithm=case.algorithm, precision=case.precision, return_lse=True
        )
        results[f"attention/{case.name}/out"] = out.get().view(np.uint8)  # npz knows no bfloat16
        results[f"attention/{case.name}/lse"] = lse.get()
    return results


def main() -> None:
    results = {**record_probes(), **record_attention()}
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    about = {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "cupy": cupy.__version__,
        "probes": compiler.source_digest(probes.SOURCE),
    }
    results["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(PATH, **results)
    print(f"{PATH}: {len(results)} arrays, {PATH.stat().st_size:,} bytes; {about}")


if __name__ == "__main__":
    main()
