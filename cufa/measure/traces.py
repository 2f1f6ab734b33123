"""Traces: when and on which SM each work item ran, and how many tiles it visited, as the kernel recorded them.

A trace file has :data:`cufa.kernels.params.TRACE_RECORD` entries (:mod:`cufa.measure.kernel_runs`). The files under
``cufa/records/traces`` ship with the package and are shown on machines without a GPU. On a machine with a GPU

    python -m cufa.measure.traces DIRECTORY --request JSON

traces the problem that the JSON describes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy.typing as npt

from ..kernels import read_config
from ..kernels.params import TRACE_RECORD
from ..plan.planner import Plan, make_plan
from ..problem.problem import Problem
from . import kernel_runs, measured
from .cards import RECORDS_DIR
from .inputs import Inputs, given_to
from .kernel_runs import KernelRun
from .machine import environment

TRACES_DIR = RECORDS_DIR / "traces"
_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Trace(KernelRun):
    """One traced run of one kernel."""

    num_sms: int
    records: npt.NDArray[Any] = dataclasses.field(repr=False)
    """:data:`cufa.kernels.params.TRACE_RECORD`, sorted by batch, head and query block."""

    @property
    def name(self) -> str:
        """Name of its file, without suffix."""
        c = self.config
        return self.file_name(f"{c.block_q}x{c.block_kv}w{c.num_warps}s{c.num_stages}")


def record(plan: Plan) -> Trace:
    """Trace a plan on the current GPU. The shortest of a few runs is kept: its caches are warm.

    Raises ValueError for a kernel that keeps no trace.
    """
    from ..run.cuda import backend as cuda

    assert plan.device is not None
    given = given_to(plan.operation, Inputs(plan.problem, on_gpu=True, seed=0).arrays(plan.problem))
    runs = [cuda.trace(plan, given) for _ in range(_RUNS)]
    if not runs[0]["end_ns"].all():
        raise ValueError(f"{plan.spec.name} writes no trace records")
    shortest = min(runs, key=lambda r: int(r["end_ns"].max() - r["start_ns"].min()))
    machine, digest = environment(plan.device), measured.digest(plan.spec)
    return Trace(plan.spec.name, digest, plan.problem, plan.config, machine, plan.device.num_sms, shortest)


def save(trace: Trace, directory: Path) -> Path:
    """Write ``<name>.trace``, with times relative to the first start."""
    shifted = trace.records.copy()
    for field in ("start_ns", "end_ns"):
        shifted[field] -= trace.records["start_ns"].min()
    return kernel_runs.save(
        directory / f"{trace.name}{kernel_runs.SUFFIX}", trace.described(), kernel_runs.fields_of(shifted)
    )


def load(file: Path) -> Trace:
    """Raises ValueError for a file that is no trace of this version."""

    def make(described: dict[str, Any], stored: kernel_runs.Arrays) -> Trace:
        return Trace(**described, records=kernel_runs.struct_of(stored, TRACE_RECORD))

    return kernel_runs.load(file, "trace", make)


def load_all(directory: Path = TRACES_DIR) -> dict[str, Trace]:
    """Every trace of a directory by file name. Raises ValueError for a damaged file."""
    return {file.stem: load(file) for file in sorted(directory.glob(f"*{kernel_runs.SUFFIX}"))}


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--request", required=True, help='{"problem": {...}, "algorithm": "fa2", "config": {...} or null}'
)
def main(directory: Path, request: str) -> None:
    """Trace one problem on the current GPU; prints the file written."""
    from ..run.cuda import backend as cuda

    if cuda.device_count() == 0:
        sys.exit("CuPy sees no NVIDIA GPU: run this command on the machine with the GPU")
    wanted = json.loads(request)
    problem, algorithm = Problem.from_json(wanted["problem"]), wanted["algorithm"]
    config = read_config(problem.operation, algorithm, wanted["config"]) if wanted.get("config") else None
    plan = make_plan(problem, cuda.current_device(), algorithm, config)
    click.echo(save(record(plan), directory))


if __name__ == "__main__":
    main()
