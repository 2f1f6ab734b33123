"""Record golden vectors on a GPU: ``python tests/golden/record.py`` writes ``golden.npz`` beside itself.

Every primitive's results for fixed bits, and every kernel's results for tiny shapes. Needs CuPy and a GPU;
prints what it wrote. The host twins are then tested against the file wherever there is no GPU.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import cupy  # noqa: E402
import machines  # noqa: E402
import numpy as np  # noqa: E402
import probes  # noqa: E402

import cufa  # noqa: E402

PATH = Path(__file__).parent / "golden.npz"


def record_probes() -> dict[str, np.ndarray]:
    recorded = [probe for probe in probes.all_probes() if machines.runs_on_gpu(probe)]
    return {f"probe/{probe.name}": machines.on_gpu(probe) for probe in recorded}


def record_case(case: probes.Case) -> dict[str, np.ndarray]:
    q, k, v = (cupy.asarray(x) for x in case.inputs())
    out, lse = cufa.flash_attention(
        q, k, v, causal=case.causal, algorithm=case.algorithm, precision=case.precision, return_lse=True
    )
    name = f"attention/{case.name}"  # npz knows no bfloat16
    return {f"{name}/out": out.get().view(np.uint8), f"{name}/lse": lse.get()}


def record_attention() -> dict[str, np.ndarray]:
    """Kernels compile side by side."""
    results = {}
    with ThreadPoolExecutor(12) as pool:
        futures = {case: pool.submit(record_case, case) for case in probes.cases()}
    for case, future in futures.items():
        try:
            results |= future.result()
        except Exception as error:
            print(f"not recorded: {case.name}: {str(error).splitlines()[0]}")
    return results


def main() -> None:
    results = {**record_probes(), **record_attention()}
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    about = {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "cupy": cupy.__version__,
        "primitives": probes.primitive_digests(),
    }
    results["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(PATH, **results)
    print(f"{PATH}: {len(results)} arrays, {PATH.stat().st_size:,} bytes, {about['gpu']}")


if __name__ == "__main__":
    main()
