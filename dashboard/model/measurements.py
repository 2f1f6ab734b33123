"""Everything that was measured, from this machine's runs and from recorded evidence, as one list."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from cufa.bench import records, timing
from cufa.bench.evidence import timing_of
from cufa.bench.timing import Ratio, Timing
from cufa.core.problem import Problem
from cufa.dashboard.model import evidence
from cufa.dashboard.worker.jobs import CPU, Json
from cufa.dashboard.worker.store import Run

#: Columns of the downloads, in this order, then the samples.
COLUMNS = (
    "id", "origin", "machine", "recorded", "suite", "kernel", "batch", "heads", "kv_heads", "seqlen_q",
    "seqlen_k", "head_dim", "dtype", "precision", "mask", "p50_s", "p10_s", "p90_s", "samples", "tflops",
    "gbytes_per_s", "of_ceiling", "ceiling", "max_error", "tiles",
)  # fmt: skip


#: Suites whose rows differ from others in more than length and batch, or in what is left out of a kernel.
_APART = ("awkward", "ladder")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One kernel on one problem, on one machine at one time."""

    id: str
    """Stable, and short enough for a link."""
    origin: str
    """"run" (made by this dashboard) or "recorded" (shipped evidence)."""
    source: str
    """Run or evidence file that it belongs to."""
    suite: str
    machine: str
    is_gpu: bool
    recorded: str
    """Date and time, ISO 8601, UTC."""
    label: str
    problem: Problem
    timing: Timing
    tflops: float
    gbytes: float
    of_ceiling: float
    ceiling: str
    error: float | None
    """None: the result held something that is no number."""
    tiles: str
    """Tile config in words; empty for another library's kernel."""
    plan: str = ""
    prepare_seconds: float | None = None

    @property
    def where(self) -> str:
        """Machine and date, which no figure goes without."""
        return f"{self.machine}{'' if self.is_gpu else ' (CPU)'}, {self.recorded[:10]}"

    @property
    def mask(self) -> str:
        return "causal" if self.problem.causal else "full"

    @property
    def family(self) -> str:
        """What stays the same along a curve over sequence length."""
        p = self.problem
        heads = str(p.heads) if p.group_size == 1 else f"{p.heads}/{p.kv_heads}"
        precision = f" ({p.precision})" if p.precision == "tf32" else ""
        suite = self.suite.removeprefix("suite ")
        apart = f"{suite}: " if suite in _APART else ""
        return f"{apart}head dim {p.head_dim}, {heads} heads, {p.dtype}{precision}, {self.mask}"

    def as_dict(self) -> Json:
        """Flat, with :data:`COLUMNS` as keys; SI units."""
        p, t = self.problem, self.timing
        values = (
            self.id, self.origin, self.machine, self.recorded, self.suite, self.label, p.batch, p.heads,
            p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.dtype, p.precision, self.mask, t.p50, t.p10,
            t.p90, len(t.samples), self.tflops, self.gbytes, self.of_ceiling, self.ceiling, self.error,
            self.tiles,
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))


def of_run(run: Run) -> list[Measurement]:
    """The rows of a run, finished or not. Raises KeyError or TypeError when its record is damaged."""
    if not run.rows:
        return []
    environment = run.record["environment"]
    recorded = run.submitted.isoformat()
    is_gpu = run.job.device != CPU
    return [
        _measurement(
            row, f"{run.id}.{n}", "run", run.id, run.job.title, environment["device"], is_gpu, recorded
        )
        for n, row in enumerate(run.rows)
    ]


def of_evidence(directory: Path | None = None) -> list[Measurement]:
    """All recorded evidence. Raises ValueError when a file is damaged."""
    return list(_of_evidence(*evidence.state_of(directory or records.RECORDS_DIR)))


@functools.lru_cache(4)
def _of_evidence(directory: Path, _: object) -> tuple[Measurement, ...]:
    found = []
    for name, record in records.load_all(directory).items():
        try:
            environment = record["environment"]
            for suite, content in record["suites"].items():
                for n, row in enumerate(content["rows"]):
                    key = f"{name}.{suite}.{n}"
                    found.append(
                        _measurement(
                            row,
                            key,
                            "recorded",
                            name,
                            suite,
                            environment["device"],
                            "arch" in environment,
                            environment["recorded"],
                        )
                    )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name}.json lacks {error}") from error
    return tuple(found)


def _measurement(
    row: Json, key: str, origin: str, source: str, suite: str, machine: str, is_gpu: bool, recorded: str
) -> Measurement:
    config = row.get("config")
    warps = f", {config['num_warps']} warps" if config and config["num_warps"] else ""
    return Measurement(
        key,
        origin,
        source,
        suite,
        machine,
        is_gpu,
        recorded,
        row["label"] if is_gpu else row["label"].removesuffix(", 1 an SM"),  # a CPU has none
        Problem(**row["problem"]),
        timing_of(row),
        row["tflops"],
        row["gbytes_per_s"],
        row["of_ceiling"],
        row["ceiling"],
        row["max_error"],
        f"{config['block_q']}×{config['block_kv']}{warps}" if config else "",
        row.get("plan", ""),
        row.get("prepare_seconds"),
    )


@functools.lru_cache(4096)
def speedup(slow: Timing, fast: Timing) -> Ratio:
    """:func:`cufa.bench.timing.speedup`, remembered: 10 ms each, and every rerun of a page asks again."""
    return timing.speedup(slow, fast)


def newest(found: Iterable[Measurement]) -> dict[tuple[str, Problem], Measurement]:
    """The latest measurement of each kernel and problem."""
    latest: dict[tuple[str, Problem], Measurement] = {}
    for m in sorted(found, key=lambda m: _time(m.recorded)):
        latest[(m.label, m.problem)] = m
    return latest


def _time(text: str) -> datetime.datetime:
    when = datetime.datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)


def machines(found: Sequence[Measurement]) -> dict[str, str]:
    """Machines in words, by a name for links; recorded evidence of a machine is apart from runs on it."""
    words = {}
    for m in found:
        kind = "recorded" if m.origin == "recorded" else "runs here"
        words[machine_key(m)] = f"{m.machine} · {'GPU' if m.is_gpu else 'CPU'} · {kind}"
    return words


def machine_key(m: Measurement) -> str:
    return f"{'recorded' if m.origin == 'recorded' else 'run'}:{m.machine}"
