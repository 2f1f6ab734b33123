"""What a worker can be asked to do: benchmark cases on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from cufa.bench.runner import Contender
from cufa.bench.suites import Case
from cufa.kernels import TileConfig
from cufa.problem import Problem

CPU = "cpu"
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases to run one after the other; the contenders of a case take turns."""

    title: str
    device: str
    """"cpu", or "cuda:0" and so on."""
    cases: tuple[Case, ...]
    seconds: float
    """Time spent measuring each case."""

    @property
    def contenders(self) -> int:
        return sum(len(contenders) for _, contenders in self.cases)

    def to_json(self) -> Json:
        cases = [
            {
                "problem": dataclasses.asdict(problem),
                "contenders": [dataclasses.asdict(c) for c in contenders],
            }
            for problem, contenders in self.cases
        ]
        return {"title": self.title, "device": self.device, "seconds": self.seconds, "cases": cases}

    @classmethod
    def from_json(cls, content: Json) -> Job:
        """Raises KeyError, TypeError or ValueError when the content is no job."""
        cases = tuple(
            (Problem(**case["problem"]), tuple(_contender(c) for c in case["contenders"]))
            for case in content["cases"]
        )
        return cls(str(content["title"]), str(content["device"]), cases, float(content["seconds"]))


def _contender(content: Json) -> Contender:
    config = content["config"]
    if config is not None:
        switches = tuple((name, value) for name, value in config.get("switches", ()))
        config = TileConfig(**{**config, "switches": switches})
    return Contender(**{**content, "config": config})


def gpu_index(device: str) -> int | None:
    """Number of the GPU, None for the CPU. Raises ValueError for anything else."""
    if device == CPU:
        return None
    name, _, number = device.partition(":")
    if name != "cuda" or not number.isdigit():
        raise ValueError(f"device {device!r} is not known; use 'cpu' or 'cuda:0'")
    return int(number)
