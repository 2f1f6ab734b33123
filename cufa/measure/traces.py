"""Traces: which thread block ran when, on which SM, and how many tiles it counted, as the kernel recorded it.

A trace file is an .npz of :data:`cufa.kernels.params.TRACE_RECORD` entries and a JSON description. Those under
``cufa/records/traces`` ship with the package and are shown on machines without a GPU. Where there is one,

    python -m cufa.measure.traces DIRECTORY --request JSON

traces the problem that the JSON describes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..kernels import KERNELS, TileConfig, read_config
from ..plan.planner import Plan, make_plan
from ..problem.problem import Problem
from . import measured, npz
from .cards import RECORDS_DIR
from .inputs import Inputs, given_to
from .machine import environment

TRACES_DIR = RECORDS_DIR / "traces"
_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Trace:
    """One traced run of one kernel."""

    kernel: str
    """Name in the registry."""
    digest: str
    """Of the kernel's sources when it was traced."""
    problem: Problem
    config: TileConfig
    num_sms: int
    environment: dict[str, Any]
    """As :func:`cufa.measure.machine.environment`."""
    records: npt.NDArray[Any] = dataclasses.field(repr=False)
    """:data:`cufa.kernels.params.TRACE_RECORD`, sorted by batch, head and query block."""
    code: str | None = None
    """Digest of the traced build's machine code, "" where it is not known; None: traced on this machine."""

    @property
    def is_current(self) -> bool:
        """Whether the traced build still gives the same machine code."""
        return measured.is_current(self.kernel, self.digest, {} if self.code is None else {"code": self.code})

    @property
    def name(self) -> str:
        """Of its file, without suffix."""
        p, c = self.problem, self.config
        parts = [self.environment["device"], self.kernel, f"b{p.batch}h{p.heads}kv{p.kv_heads}"]
        parts += [f"{p.seqlen_q}x{p.seqlen_k}", f"d{p.head_dim}", p.dtype, p.scores_text]
        parts += [f"{c.block_q}x{c.block_kv}w{c.num_warps}s{c.num_stages}"]
        return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def record(plan: Plan) -> Trace:
    """Trace a plan on the current GPU: of a few runs the shortest, so that caches and clocks are warm.

    Raises ValueError for a kernel that keeps no trace.
    """
    from ..run.cuda import backend as cuda

    assert plan.device is not None
    arrays = Inputs(plan.problem, on_gpu=True, seed=0).arrays(plan.problem)
    given = given_to(plan.operation, arrays)
    runs = [cuda.trace(plan, given) for _ in range(_RUNS)]
    if not runs[0]["end_ns"].all():
        raise ValueError(f"{plan.spec.name} writes no trace records")
    shortest = min(runs, key=lambda r: int(r["end_ns"].max() - r["start_ns"].min()))
    here, digest = environment(plan.device), measured.digest(plan.spec)
    return Trace(plan.spec.name, digest, plan.problem, plan.config, plan.device.num_sms, here, shortest)


def save(trace: Trace, directory: Path) -> Path:
    """Write ``<name>.npz``. Start times count from the first."""
    shifted = trace.records.copy()
    for field in ("start_ns", "end_ns"):
        shifted[field] -= trace.records["start_ns"].min()
    described = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.name != "records"}
    described |= {"problem": trace.problem.as_json(), "config": dataclasses.asdict(trace.config)}
    arrays = {name: shifted[name] for name in shifted.dtype.names or ()}
    return npz.save(directory / f"{trace.name}.npz", described, arrays)


def load(file: Path) -> Trace:
    """Raises ValueError for a file that is no trace of this version."""
    from ..kernels.params import TRACE_RECORD

    try:
        described, stored = npz.load(file)
        found = np.zeros(len(stored["sm"]), TRACE_RECORD)
        for name in TRACE_RECORD.names or ():
            found[name] = stored[name]
        described.pop("schema", None)
        described["problem"] = Problem.from_json(described["problem"])
        described["config"] = KERNELS[described["kernel"]].read_config(described["config"])
        return Trace(**described, records=found)
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file.name} is no trace that this version reads: {error}") from error


def load_all(directory: Path = TRACES_DIR) -> dict[str, Trace]:
    """Every trace of a directory by file name. Raises ValueError for a damaged one."""
    return {file.stem: load(file) for file in sorted(directory.glob("*.npz"))}


def _requested(text: str, device: Device) -> Plan:
    request = json.loads(text)
    problem, algorithm, config = Problem.from_json(request["problem"]), request["algorithm"], None
    if request.get("config"):
        config = read_config(problem.operation, algorithm, request["config"])
    return make_plan(problem, device, algorithm, config)


def main() -> None:
    """Trace one problem on the current GPU; prints the file written."""
    parser = argparse.ArgumentParser(prog="python -m cufa.measure.traces", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--request", required=True, help='{"problem": {...}, "algorithm": "fa2", "config": {...} or null}'
    )
    arguments = parser.parse_args()

    from ..run.cuda import backend as cuda

    if cuda.device_count() == 0:
        sys.exit("CuPy sees no NVIDIA GPU: a trace is recorded where the kernel runs")
    device = cuda.current_device()
    print(save(record(_requested(arguments.request, device)), arguments.directory), flush=True)


if __name__ == "__main__":
    main()
