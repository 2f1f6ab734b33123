"""What a worker can be asked to do: benchmark cases on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from cufa.bench.decode import DecodeCase, DecodeContender
from cufa.bench.runner import Contender
from cufa.bench.suites import Case
from cufa.core.problem import Problem
from cufa.decode.problem import DecodeProblem
from cufa.kernels import TileConfig

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
    decode: tuple[DecodeCase, ...] = ()
    """After ``cases``; only on a GPU."""

    @property
    def total(self) -> int:
        """Cases of both kinds."""
        return len(self.cases) + len(self.decode)

    @property
    def contenders(self) -> int:
        decoding = sum(len(case.contenders) for case in self.decode)
        return sum(len(contenders) for _, contenders in self.cases) + decoding

    @property
    def kernels(self) -> list[str]:
        """Algorithms, each once."""
        named = [c.algorithm for _, contenders in self.cases for c in contenders]
        return list(dict.fromkeys([*named, *(c.label for case in self.decode for c in case.contenders)]))

    def to_json(self) -> Json:
        cases = [
            {
                "problem": dataclasses.asdict(problem),
                "contenders": [dataclasses.asdict(c) for c in contenders],
            }
            for problem, contenders in self.cases
        ]
        decode = [dataclasses.asdict(case) for case in self.decode]
        return {
            "title": self.title,
            "device": self.device,
            "seconds": self.seconds,
            "cases": cases,
            "decode": decode,
        }

    @classmethod
    def from_json(cls, content: Json) -> Job:
        """Raises KeyError, TypeError or ValueError when the content is no job."""
        cases = tuple(
            (Problem(**case["problem"]), tuple(_contender(c) for c in case["contenders"]))
            for case in content["cases"]
        )
        decode = tuple(_decode_case(case) for case in content.get("decode", ()))
        return cls(str(content["title"]), str(content["device"]), cases, float(content["seconds"]), decode)


def _decode_case(content: Json) -> DecodeCase:
    contenders = tuple(
        DecodeContender(**{**c, "problem": DecodeProblem(**c["problem"])}) for c in content["contenders"]
    )
    lengths = None if content["lengths"] is None else tuple(content["lengths"])
    return DecodeCase(**{**content, "contenders": contenders, "lengths": lengths})


def _contender(content: Json) -> Contender:
    config = content["config"]
    if config is not None:
        switches = tuple((name, value) for name, value in config.get("switches", ()))
        config = TileConfig(**{**config, "switches": switches})
    return Contender(**{**content, "config": config})


def rows_of(record: Json, kind: str) -> list[Json]:
    """Where a run's record keeps events of a kind: "row", "decode", "skipped" or "failed"."""
    section = record.setdefault("decode", {"rows": []}) if kind == "decode" else record  # as evidence has it
    rows: list[Json] = section["rows" if kind in ("row", "decode") else kind]
    return rows


def gpu_index(device: str) -> int | None:
    """Number of the GPU, None for the CPU. Raises ValueError for anything else."""
    if device == CPU:
        return None
    name, _, number = device.partition(":")
    if name != "cuda" or not number.isdigit():
        raise ValueError(f"device {device!r} is not known; use 'cpu' or 'cuda:0'")
    return int(number)
