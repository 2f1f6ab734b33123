"""Counters of standard shapes, recorded so that they can be shown where there is no C++ compiler.

Counts from executing the kernels on a CPU, not measurements on a GPU; the file says so. Each kernel's entry
carries the digest of the sources it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...build.compiler import source_digest
from ...kernels import Kernel, kernels_of
from ...measure.cards import RECORDS_DIR
from ...plan.operation import OPERATIONS
from ...plan.tuning import write_json
from ...problem.mask import Mask
from ...reference.dense import attention_reference
from .calls import Emulation, emulate, emulate_backward

PATH = RECORDS_DIR / "emulated" / "counters.json"
ARCH = "sm_90"
SEQLEN = 1024
_ABOUT = (
    "Counts from executing the kernels' CUDA source on a CPU (cufa emulate --mode counted), one head. "
    "Not measured on a GPU. Wavefronts and bank conflicts follow the model in cuda_src/host/bank_model.h."
)

#: What :func:`emulate` and :func:`emulate_backward` execute.
KERNELS = kernels_of("forward") | kernels_of("backward")

#: Counters that describe the emulation, not the kernel.
INTERNAL = ("switches",)


def standard_inputs(dtype: str, head_dim: int) -> list[npt.NDArray[Any]]:
    """q, k, v and a gradient of the recorded shapes: (1, 1, 1024, head_dim)."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 1, SEQLEN, head_dim)).astype(dtype) for _ in range(4)]


def standard_runs(spec: Kernel) -> Iterator[tuple[Mask, int]]:
    """(mask, head_dim) of the recorded runs: one mask of each kind that the kernel serves."""
    for head_dim in (64, 128):
        compiled = OPERATIONS[spec.operation].compiled(spec, head_dim)
        for mask in dict.fromkeys(problem.mask for problem in compiled if spec.refuses(problem) is None):
            yield mask, head_dim


def run_standard(spec: Kernel, mask: Mask, head_dim: int) -> Emulation:
    """One recorded run, made anew."""
    q, k, v, dout = standard_inputs(spec.dtypes[0], head_dim)
    options: dict[str, Any] = {"mask": mask, "algorithm": spec.algorithm, "mode": "counted", "arch": ARCH}
    if "dout" not in OPERATIONS[spec.operation].inputs:
        return emulate(q, k, v, **options)
    out, lse = attention_reference(q, k, v, mask=mask, return_lse=True)
    return emulate_backward(dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), **options)


def summary(run: Emulation) -> dict[str, Any]:
    """Totals, and the spread over blocks of each launch: [fewest, median, most]."""
    totals = {name: count for name, count in run.totals.items() if name not in INTERNAL}
    blocks = {
        entry: {
            name: [int(f(counts[name])) for f in (np.min, np.median, np.max)]
            for name in counts.dtype.names or ()
            if name not in INTERNAL and counts[name].any()
        }
        for entry, counts in run.counters.items()
    }
    return {
        "problem": run.plan.problem.as_json(),
        "config": str(run.plan.config),
        "grids": {launch.entry: list(launch.grid) for launch in run.plan.launches},
        "totals": totals,
        "per_block": blocks,
    }


def record() -> None:
    """Make every recorded run anew and write :data:`PATH`."""
    kernels = {
        spec.name: {
            "digest": source_digest(*spec.sources),
            "runs": [summary(run_standard(spec, *options)) for options in standard_runs(spec)],
        }
        for spec in KERNELS.values()
    }
    write_json(PATH, {"about": _ABOUT, "arch": ARCH, "kernels": kernels})


def load() -> dict[str, Any]:
    """What :func:`record` wrote. Raises FileNotFoundError when the package was built without it."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def stale() -> list[str]:
    """Kernels whose sources have changed since they were recorded."""
    recorded = load()["kernels"]
    return [
        spec.name
        for spec in KERNELS.values()
        if recorded.get(spec.name, {}).get("digest") != source_digest(*spec.sources)
    ]
