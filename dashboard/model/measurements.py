"""One measurement, from a run on this machine or recorded on another machine.

:mod:`cufa.dashboard.model.measured_rows` makes a :class:`Measurement` of each row, of any operation and regime.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

from cufa.commands.common import rate_text
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.model.work import flops_per_score
from cufa.dashboard.worker.jobs import Json
from cufa.kernels import KERNELS, Split
from cufa.measure.cases import Work
from cufa.measure.limits import Limits
from cufa.measure.measured import Measured
from cufa.measure.regimes import Regime
from cufa.measure.timing import Timing
from cufa.plan.operation import OPERATIONS, Operation
from cufa.problem.problem import Problem

_FLOP_PER_CLOCK = 4096
"""FLOP per clock of one Hopper SM: wgmma with 16-bit operands."""

#: Columns of the downloads, in order; samples follow.
COLUMNS = (
    "id", "origin", "machine", "recorded", "suite", "case", "operation", "kernel", "batch", "heads", "kv_heads",
    "seqlen_q", "seqlen_k", "lengths", "head_dim", "dtype", "k_dtype", "precision", "mask", "softcap", "regime",
    "p50_s", "p10_s", "p90_s", "samples", "tflops", "gbytes_per_s", "of_ceiling", "ceiling", "of_read",
    "max_error", "tiles", "split", "joules", "tflop_per_joule", "watts", "clock_mhz",
)  # fmt: skip

#: Suites whose rows do not belong to the curves of other suites.
_APART = ("awkward", "ladder", "backward-ladder", "fp8")


def in_words(problem: Problem, case: str = "") -> str:
    """The name of a case, or its problem, always with the mask."""
    text = case or str(problem)
    return text if problem.scores_text in text else f"{text}, {problem.scores_text}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One kernel on one problem, on one machine at one time."""

    id: str
    """Stable name in links."""
    origin: str
    """"run" (made by this dashboard) or "recorded" (shipped with the package)."""
    source: str
    """The run or the card."""
    suite: str
    machine: str
    is_gpu: bool
    recorded: str
    """Date and time, ISO 8601, UTC."""
    label: str
    row: Measured
    of_read: float | None = None
    """Rate as a share of a plain read of the same bytes, timed beside this row; None: no read was timed."""
    commit: str = ""
    """Commit of the measured checkout, or digest of the kernel's source; empty: unknown."""
    clock_limit: str = ""
    """The card's highest SM clock, in words."""
    limits: Limits | None = dataclasses.field(default=None, repr=False, compare=False)
    """The machine's ceilings, equal for all its measurements; None: the ceilings of the measurement's session apply."""
    environment: Json = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """The run's environment: :func:`cufa.measure.machine.environment`."""

    # Fields of the row (seconds: the median; gbytes: GB/s):
    problem = functools.cached_property[Problem](operator.attrgetter("row.problem"))
    regime = functools.cached_property[Regime](operator.attrgetter("row.regime"))
    timing = functools.cached_property[Timing](operator.attrgetter("row.timing"))
    seconds = functools.cached_property[float](operator.attrgetter("row.seconds"))
    tflops = functools.cached_property[float](operator.attrgetter("row.tflops"))
    gbytes = functools.cached_property[float](operator.attrgetter("row.gbytes"))
    needs = functools.cached_property[dict[str, float]](operator.attrgetter("row.needs"))
    predicted = functools.cached_property[float | None](operator.attrgetter("row.predicted"))
    load = functools.cached_property[Json](operator.attrgetter("row.load"))

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.problem.operation]

    @property
    def case(self) -> str:
        """The name of the case, or the problem."""
        return self.row.case or str(self.problem)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Valid keys of each sequence; None: the whole cache, or unknown."""
        lengths = self.row.json.get("lengths")
        return None if lengths is None else tuple(lengths)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for measurements of the same kernel, problem, lengths and regime."""
        return self.label, self.problem, self.row.json["io_bytes"], self.regime

    @property
    def machine_key(self) -> str:
        """The machine's name in links."""
        return f"{'recorded' if self.origin == 'recorded' else 'run'}:{self.machine}"

    @property
    def quantity(self) -> tuple[object, ...]:
        """Equal for measurements of one quantity on one machine, at any time and in any suite."""
        return self.machine_key, *self.key

    @property
    def group(self) -> tuple[object, ...]:
        """Equal for the contenders of one case."""
        return self.source, *self.row.group

    @property
    def how(self) -> str:
        """A sentence about the regime. On a CPU, the L2 cache is not flushed."""
        return self.regime.how if self.is_gpu else self.regime.how.replace("L2 is cold; ", "")

    @property
    def speed(self) -> str:
        """FLOP per second, or bytes per second for a memory-bound operation."""
        if self.operation.memory_bound:
            return f"{self.gbytes / 1e3:.2f} TB/s" if self.gbytes >= 100 else f"{self.gbytes:.3g} GB/s"
        return rate_text(self.tflops)

    @functools.cached_property
    def bound(self) -> tuple[float, str]:
        """The least seconds that the machine's ceilings allow, and the resource that sets them."""
        row = self.row.json
        if self.limits is not None:
            scores = row["flops"] // flops_per_score(self.problem)
            least = self.limits.floor(self.problem, Work(row["flops"], row["io_bytes"], scores))
            rate, clock = self.clock_flops, self.load.get("clock_mhz")
            at_clock = (row["flops"] / rate, f"products at {clock:,.0f} MHz") if rate else least
            return max(least, at_clock)
        share = row.get("of_ceiling") or self.of_read or 0.0  # without ceilings, against a plain read
        return float(share) * self.seconds, str(row.get("ceiling") or "a plain read")

    @property
    def clock_flops(self) -> float:
        """Ceiling of products at the recorded SM clock, which the power limit sets under lasting load; 0: not known."""
        clock, sms = self.load.get("clock_mhz"), self.environment.get("num_sms")
        if not (clock and sms and self.environment.get("arch") == "sm_90" and self.problem.itemsize == 2):
            return 0.0
        return float(sms * _FLOP_PER_CLOCK * clock * 1e6)

    @property
    def of_ceiling(self) -> float:
        """Share of the speed that the ceiling allows: 1.0 is the ceiling."""
        return self.bound[0] / self.seconds

    @property
    def ceiling(self) -> str:
        return self.bound[1]

    @property
    def error(self) -> float | None:
        """Largest absolute error; None: the result contained NaN."""
        error = self.row.json["max_error"]
        return None if error is None else float(error)

    @property
    def load_text(self) -> str:
        """Clock, power and energy in words; "" for contenders in turns."""
        load = self.load
        parts = (
            ("clock_mhz", "{:,.0f} MHz"), ("watts", "{:,.0f} W"), ("joules", "{:.3g} J per call"),
            ("tflop_per_joule", "{:.3g} TFLOP per joule"),
        )  # fmt: skip
        words_of_load = [words.format(load[name]) for name, words in parts if load.get(name) is not None]
        words_of_load += [
            f"throttled by the {name} {share:.0%} of the time"
            for name, share in load.get("throttled", {}).items()
        ]
        words_of_load += ["limited by the host: this is launch time, not kernel time"] * self.row.host_bound
        return ", ".join(words_of_load)

    @property
    def kernel(self) -> str | None:
        """Name in the registry; None for another library."""
        return self.row.json.get("kernel")

    @property
    def tiles(self) -> str:
        """Tile config in words; empty for another library."""
        config = self.row.json.get("config")
        if not config:
            return ""
        warps = f", {config['num_warps']} warps" if config["num_warps"] else ""
        return f"{config['block_q']}×{config['block_kv']}{warps}"

    @property
    def subject(self) -> Subject:
        """Problem, kernel and tiles for links to other pages."""
        config, spec = self.row.json.get("config"), KERNELS.get(self.kernel or "")
        read = spec.read_config(config) if spec is not None and config else None
        return Subject(self.problem, None if spec is None else spec.name, read)

    @property
    def split(self) -> Split | None:
        split = self.row.json.get("split")
        return None if split is None else Split(**split)

    @property
    def plan(self) -> str:
        return str(self.row.json.get("plan", ""))

    @property
    def prepare_seconds(self) -> float | None:
        seconds = self.row.json.get("prepare_seconds")
        return None if seconds is None else float(seconds)

    @property
    def where(self) -> str:
        """Machine and date, and whether a GPU kernel has changed since the measurement."""
        where = f"{self.machine}{'' if self.is_gpu else ' (CPU)'}, {self.recorded[:10]}"
        return f"{where} (changed since: {self.kernel})" if self.is_stale else where

    @property
    def is_stale(self) -> bool:
        """A GPU kernel has changed since the measurement."""
        return self.is_gpu and self.row.is_stale

    @property
    def mask(self) -> str:
        return self.problem.scores_text

    @property
    def family(self) -> str:
        """The constant properties of a curve over sequence length."""
        p = self.problem
        suite = self.suite.removeprefix("suite ")
        parts = [f"head dim {p.head_dim}", f"{p.heads_text} heads"]
        if self.operation.memory_bound:  # here the batch does not shrink with longer sequences
            tokens = f", {p.seqlen_q} tokens" if p.seqlen_q > 1 else ""
            parts = [f"batch {p.batch}{tokens}", *parts, str(p.lengths)]
        elif p.seqlen_q != p.seqlen_k:
            parts.append(f"{p.seqlen_q:,} queries")
        elements = p.dtype if p.k_element is p.q_element else f"{p.dtype} over {p.k_element.name}"
        parts += [f"{elements} (tf32)" if p.precision == "tf32" else elements, self.mask]
        apart = f"{suite}: " if suite in _APART else ""
        return f"{self.operation.title}: {apart}{', '.join(parts)}"

    def as_dict(self) -> Json:
        """Flat, with :data:`COLUMNS` as keys; SI units."""
        p, t, load = self.problem, self.timing, self.load
        lengths = "" if self.lengths is None else " ".join(map(str, self.lengths))
        split = f"{self.split.kind} {self.split.count}" if self.split else ""
        values = (
            self.id, self.origin, self.machine, self.recorded, self.suite, self.row.case, p.operation, self.label,
            p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, lengths, p.head_dim, p.dtype, p.k_element.name,
            p.precision, str(p.mask), p.softcap, str(self.regime), t.p50, t.p10, t.p90, t.count, self.tflops,
            self.gbytes, self.of_ceiling, self.ceiling, self.of_read, self.error, self.tiles, split,
            load.get("joules"), load.get("tflop_per_joule"), load.get("watts"), load.get("clock_mhz"),
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))
