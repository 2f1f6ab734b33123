"""Cases of a benchmark: one problem on one set of inputs, and the contenders that are compared on it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..gpu.architectures import Device
from ..kernels import TileConfig, kernels_of, read_config
from ..plan.planner import Plan, make_plan
from ..problem.problem import Problem
from . import peers
from .quantized import QUANTIZE, Quantized

#: A contender that computes nothing: it only reads the keys and values of a case once.
READ = "streaming read"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A kernel of cufa with one tile config, a peer, or the streaming read."""

    algorithm: str = "auto"
    """``algorithm`` of the public call, a name of :data:`cufa.measure.peers.PEERS`, or :data:`READ`."""
    config: TileConfig | None = None
    """None: the planner's tiles."""
    name: str = ""
    """Label of its rows; "": algorithm and tiles."""
    num_splits: int | None = None
    """None: the planner's splits."""
    one_item_a_block: bool = False
    """Launch a persistent kernel with one thread block per work item, to measure the gain of persistent blocks."""
    problem: Problem | None = None
    """A variant on the case's keys and values: in pages, only the first keys, or with other query heads. None: the
    case's problem."""
    quantized: Quantized | None = None
    """q, k and v are quantised to e4m3 first. Only contender :data:`~cufa.measure.quantized.QUANTIZE` times this."""

    @property
    def is_peer(self) -> bool:
        return self.algorithm in peers.PEERS

    @property
    def is_ours(self) -> bool:
        return not self.is_peer and self.algorithm not in (READ, QUANTIZE)

    @property
    def label(self) -> str:
        if self.name or self.config is None:
            recipe = str(self.quantized) if self.quantized and self.is_ours else ""
            return self.name or recipe or self.algorithm
        return f"{self.algorithm} {self.config}, {self.config.blocks_per_sm} an SM"

    def plan(self, problem: Problem, device: Device | None) -> Plan:
        """The plan of one of cufa's kernels on a case's problem. Raises ValueError if no kernel serves the problem."""
        plan = make_plan(
            self.problem_of(problem), device, self.algorithm, self.config, num_splits=self.num_splits
        )
        return one_item_a_block(plan) if self.one_item_a_block else plan

    def problem_of(self, problem: Problem) -> Problem:
        """The contender's problem in a case whose problem is ``problem``."""
        if self.quantized and self.is_ours:
            return self.quantized.problem(problem)
        return self.problem or problem

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "problem": self.problem and self.problem.as_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any], operation: str) -> Contender:
        """Raises KeyError, TypeError or ValueError for JSON that :meth:`as_json` did not write."""
        config, problem, quantized = (content.get(x) for x in ("config", "problem", "quantized"))
        read = {
            "config": config and read_config(operation, content["algorithm"], config),
            "problem": problem and Problem.from_json(problem),
            "quantized": quantized and Quantized(**quantized),
        }
        return cls(**{**content, **read})


@dataclasses.dataclass(frozen=True)
class Case:
    problem: Problem
    contenders: tuple[Contender, ...]
    name: str = ""
    """Name in records and tables; "": the problem in words."""
    lengths: tuple[int, ...] | None = None
    """Valid keys of each sequence of a cache; None: all are full."""
    distribution: str = ""
    """Inputs by a name of :data:`~cufa.measure.distributions.DISTRIBUTIONS`; rows then have an
    :class:`~cufa.measure.check.Accuracy`. "": standard normal inputs; rows have the largest error only."""

    @property
    def title(self) -> str:
        return self.name or str(self.problem)

    def problem_of(self, contender: Contender) -> Problem:
        return contender.problem_of(self.problem)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "problem": self.problem.as_json(),
            "lengths": self.lengths and list(self.lengths),
            "distribution": self.distribution,
            "contenders": [contender.as_json() for contender in self.contenders],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Case:
        """Raises KeyError, TypeError or ValueError for JSON that :meth:`as_json` did not write."""
        problem, lengths = Problem.from_json(content["problem"]), content.get("lengths")
        return cls(
            problem,
            tuple(Contender.from_json(c, problem.operation) for c in content["contenders"]),
            str(content["name"]),
            lengths and tuple(int(n) for n in lengths),
            str(content.get("distribution", "")),
        )


def contenders(*algorithms: str) -> tuple[Contender, ...]:
    return tuple(Contender(algorithm) for algorithm in algorithms)


def of_forward(problem: Problem, *, deterministic: bool = False) -> Problem:
    """The backward of a forward problem."""
    return dataclasses.replace(problem, operation="backward", deterministic=deterministic)


def best(problem: Problem, device: Device | None) -> list[str]:
    """Algorithms meant to be fast (those that skip masked tiles) that serve a problem, preferred first."""
    capability = device.arch.capability if device else None
    serving = (
        spec.algorithm
        for spec in kernels_of(problem.operation).values()
        if spec.skip_masked_tiles
        and not spec.refuses(problem, capability)
        and any(config.fits(problem.head_dim, problem.v_dim) for config in spec.configs)
    )
    return list(dict.fromkeys(serving))


def one_item_a_block(plan: Plan) -> Plan:
    """The same kernel with one thread block for each query block of each head."""
    items = plan.schedule.num_q_blocks * plan.problem.batch * plan.problem.heads
    launches = (dataclasses.replace(x, grid=(items, 1, 1)) if x.persistent else x for x in plan.launches)
    return dataclasses.replace(plan, launches=tuple(launches))


def as_launched(plan: Plan, grids: list[list[int]]) -> Plan:
    """The variant of the plan that was launched with these grids: one thread block per work item if only this variant
    has them, else the plan itself."""
    variant = one_item_a_block(plan)
    planned, varied = ([list(launch.grid) for launch in x.launches] for x in (plan, variant))
    return variant if grids == varied != planned else plan


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work for one result: the numerator of rates."""

    flops: int
    io_bytes: int
    scores: int
    """Visible scores of all heads. Each takes one exponential."""

    @classmethod
    def of(cls, problem: Problem, lengths: tuple[int, ...] | None = None) -> Work:
        """``lengths``: valid keys of each sequence; None: all keys of the arrays."""
        parts = [problem]
        if lengths is not None:
            parts = [dataclasses.replace(problem, batch=1, seqlen_k=n) for n in lengths]
        scores = sum(p.batch * p.heads * p.visible_scores for p in parts)
        return cls(sum(p.flops for p in parts), sum(p.io_bytes for p in parts), scores)
