"""Traces: which thread block ran when, on which SM, and how many tiles it counted, as the kernel recorded it.

A trace file is an .npz of :data:`cufa.kernels.params.TRACE_RECORD` entries and a JSON description. Those under
``cufa/records/traces`` are evidence, shipped with the package and shown on machines without a GPU. Where
there is one,

    python -m cufa.measure.traces DIRECTORY

records the evidence set, and with ``--request JSON`` the one problem that it describes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..kernels import KERNELS, TileConfig, read_config
from ..plan.planner import Plan, make_plan
from ..problem.mask import CAUSAL
from ..problem.problem import Problem
from . import records, records_v1
from .backward_cases import of_forward
from .inputs import Inputs, given_to
from .suites import make

TRACES_DIR = records.RECORDS_DIR / "traces"
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
    environment: records.Json
    """As :func:`cufa.measure.records.environment`."""
    records: npt.NDArray[Any] = dataclasses.field(repr=False)
    """:data:`cufa.kernels.params.TRACE_RECORD`, sorted by batch, head and query block."""

    @property
    def is_current(self) -> bool:
        """Whether the kernel's sources are still those that were traced."""
        return self.kernel in KERNELS and self.digest == records.digest(KERNELS[self.kernel])

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
    environment = records.environment(plan.device)
    digest = records.digest(plan.spec)
    return Trace(
        plan.spec.name, digest, plan.problem, plan.config, plan.device.num_sms, environment, shortest
    )


def save(trace: Trace, directory: Path) -> Path:
    """Write ``<name>.npz``. Start times count from the first, which makes the file a third smaller."""
    shifted = trace.records.copy()
    for field in ("start_ns", "end_ns"):
        shifted[field] -= trace.records["start_ns"].min()
    described = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.name != "records"}
    described |= {"problem": trace.problem.as_json(), "config": dataclasses.asdict(trace.config)}
    text = json.dumps({"schema": records.SCHEMA, **described})
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{trace.name}.npz"
    arrays: dict[str, Any] = {name: shifted[name] for name in shifted.dtype.names or ()}
    np.savez_compressed(file, description=np.array(text), **arrays)
    return file


def load(file: Path) -> Trace:
    """Raises ValueError for a file that is no trace of this version."""
    from ..kernels.params import TRACE_RECORD

    try:
        with np.load(file, allow_pickle=False) as stored:
            described = _described(json.loads(str(stored["description"])))
            found = np.zeros(len(stored["sm"]), TRACE_RECORD)
            for name in TRACE_RECORD.names or ():
                kept_as = name if name in stored.files else records_v1.TRACE_FIELDS.get(name)
                if kept_as:
                    found[name] = stored[kept_as]
        described["problem"] = Problem.from_json(described["problem"])
        described["config"] = KERNELS[described["kernel"]].read_config(described["config"])
        return Trace(**described, records=found)
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file.name} is no trace that this version reads: {error}") from error


def _described(description: records.Json) -> records.Json:
    """In this version's schema."""
    schema = description.pop("schema")
    if schema == 1:
        description["problem"] = records_v1.problem(description["problem"])
    elif schema != records.SCHEMA:
        raise ValueError(f"it has schema {schema!r}")
    return description


def load_all(directory: Path = TRACES_DIR) -> dict[str, Trace]:
    """Every trace of a directory by file name. Raises ValueError for a damaged one."""
    return {file.stem: load(file) for file in sorted(directory.glob("*.npz"))}


def evidence_plans(device: Device) -> Iterator[Plan]:
    """What is recorded as evidence: each algorithm where the GPU is full, and where it is nearly empty."""
    for batch, heads, seqlen, head_dim in ((4, 16, 4096, 128), (2, 4, 2048, 64)):
        problem = make(batch, heads, seqlen, head_dim, "bfloat16", CAUSAL)
        for algorithm in ("fa1", "fa2_noskip", "fa2", "fa3"):
            with contextlib.suppress(ValueError):  # not every GPU runs every kernel
                yield make_plan(problem, device, algorithm)
        yield make_plan(of_forward(problem), device)


def renewed(device: Device, plans: Iterable[Plan], directory: Path) -> list[Plan]:
    """Those of ``plans`` of which the folder holds no trace on this card by the kernel as it is now; the card's traces
    of anything else are deleted."""
    wanted = {(plan.spec.name, plan.problem, plan.config): plan for plan in plans}
    for file in sorted(directory.glob("*.npz")):
        try:
            trace = load(file)
        except ValueError:  # of which card is not known
            continue
        key = trace.kernel, trace.problem, trace.config
        if trace.environment["device"] != device.name:
            continue
        if trace.is_current and key in wanted:
            del wanted[key]
        else:
            file.unlink()
    return list(wanted.values())


def _requested(text: str, device: Device) -> Plan:
    request = json.loads(text)
    problem, algorithm, config = Problem.from_json(request["problem"]), request["algorithm"], None
    if request.get("config"):
        config = read_config(problem.operation, algorithm, request["config"])
    return make_plan(problem, device, algorithm, config)


def main() -> None:
    """Record traces on the current GPU; prints the files written, one per line."""
    parser = argparse.ArgumentParser(prog="python -m cufa.measure.traces", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--request", help='{"problem": {...}, "algorithm": "fa2", "config": {...} or null}')
    arguments = parser.parse_args()

    from ..run.cuda import backend as cuda

    if cuda.device_count() == 0:
        sys.exit("CuPy sees no NVIDIA GPU: a trace is recorded where the kernel runs")
    device = cuda.current_device()
    plans = [_requested(arguments.request, device)] if arguments.request else list(evidence_plans(device))
    for plan in plans:
        print(save(record(plan), arguments.directory), flush=True)


if __name__ == "__main__":
    main()
