"""Jobs of a worker: benchmark cases of any operation, on one device, under one regime."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from cufa.measure.cases import Case
from cufa.measure.regimes import Regime

CPU = "cpu"
SCHEMA = 2
_GPU = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases to run one after the other."""

    title: str
    device: str
    """"cpu", or "cuda:0" and so on."""
    cases: tuple[Case, ...]
    seconds: float
    """Measuring time per case (in turns), or per contender (sustained)."""
    regime: Regime = Regime.IN_TURNS

    def __post_init__(self) -> None:
        gpu_index(self.device)  # the name becomes part of a file name
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"a job measures for 0 seconds or more, got {self.seconds}")

    @property
    def total(self) -> int:
        return len(self.cases)

    @property
    def contenders(self) -> int:
        return sum(len(case.contenders) for case in self.cases)

    @property
    def kernels(self) -> list[str]:
        """Names of the contenders without tiles, each once."""
        named = (c.name or c.algorithm for case in self.cases for c in case.contenders)
        return list(dict.fromkeys(named))

    def to_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "title": self.title,
            "device": self.device,
            "seconds": self.seconds,
            "regime": self.regime.value,
            "cases": [case.as_json() for case in self.cases],
        }

    @classmethod
    def from_json(cls, content: Json) -> Job:
        """Raises KeyError, TypeError or ValueError if the content is not a job of this schema."""
        schema = content.get("schema", 1)
        if schema != SCHEMA:
            raise ValueError(f"it has schema {schema!r}; this version reads schema {SCHEMA}")
        cases = tuple(Case.from_json(case) for case in content["cases"])
        regime = Regime(content["regime"])
        return cls(str(content["title"]), str(content["device"]), cases, float(content["seconds"]), regime)


def gpu_index(device: str) -> int | None:
    """Number of the GPU, None for the CPU. Raises ValueError for anything else."""
    if device == CPU:
        return None
    if not _GPU.fullmatch(device):
        raise ValueError(f"device {device!r} is not known; use 'cpu' or 'cuda:0'")
    return int(device.partition(":")[2])


#: Stands for an unreadable job.
UNREADABLE = Job("unreadable", CPU, (), 0.0)
