"""What cufa computes, one record per operation: forward, decode, and those to come.

Planner, backends, executor, benchmark, records, commands and dashboard iterate :data:`OPERATIONS` and ask the
record; none of them knows an operation by its name. Another operation is one file under ``cufa/ops``, its
kernels, and one literal each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..build.params import Params

if TYPE_CHECKING:
    from ..gpu.architectures import Device
    from ..kernels import KernelSpec, TileConfig
    from ..problem.problem import Problem
    from .planner import Plan

Arrays = Mapping[str, Any]
"""The arrays of one call by operand name, in canonical axis order; None for those left out."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a call. Signatures, checks, parameter structures, tensor maps and the executor's guards
    follow from this declaration."""

    name: str
    """Argument of the public call."""
    field: str = ""
    """Pointer in the parameter structure; "" as the argument."""
    result: bool = False
    """It is returned: allocated by the call, unless the caller gives an array for it."""
    like: str | Callable[[Problem], tuple[int, ...]] = ""
    """Of a result: the input whose shape and dtype it has; or its shape, contiguous and in the log-sum-exp's dtype."""
    nothing: float = 0.0
    """Of a result: what it holds where there is no score at all."""
    written: bool = False
    """Kernels may write to it, as they do to every result."""
    mapped: bool = False
    """Kernels of Hopper read or write it by the copy engine."""
    stride: str = ""
    """For arrays of (batch, heads, seqlen, head_dim) or their like, with any strides: where the structure keeps
    those of the first three axes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)
        object.__setattr__(self, "written", self.written or self.result)

    @property
    def map_field(self) -> str:
        """Where the parameter structure keeps this operand's tensor map, if it does."""
        return self.stride.replace("_stride", "_map")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Tiles that `cufa tune` measured fastest for a class of problems."""

    config: TileConfig
    planned: TileConfig | None = None
    """What the planner took for the problem that was measured: where it takes others, nothing is known of these.
    None: not written down, as once."""
    found: str = "measured fastest by `cufa tune`"
    """On which card, when, and by how much, for printed plans."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the caller asked of the planner beyond the problem."""

    algorithm: str = "auto"
    config: TileConfig | None = None
    num_splits: int | None = None
    tuned: Mapping[str, Tuned] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Split:
    """How the keys of an item are shared out over thread blocks whose results are merged."""

    kind: str
    """"fixed": so many splits of each sequence; "balanced": so many shares of all tiles, at most."""
    count: int
    least: int = 1
    """"balanced", where lengths are known on the device alone: so many shares, if there are as many tiles."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A planner's decision among the kernels that serve a problem."""

    spec: KernelSpec
    config: TileConfig
    reasons: tuple[str, ...] = ()
    split: Split | None = None


Choose = Callable[["Problem", "Device | None", "list[KernelSpec]", Request], Choice]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Everything that the rest of the house must know of one operation."""

    name: str
    title: str
    operands: tuple[Operand, ...]
    """In the order in which launches take their addresses."""
    params: Params
    """The parameter structure of its kernels."""
    scalars: Callable[[Plan, Arrays], dict[str, int | float]]
    """Every number of that structure."""
    choose: Choose
    """Kernel, tiles and splits, from the kernels that serve."""
    cpu_spec: Callable[[list[KernelSpec]], KernelSpec]
    """Of the kernels of an algorithm, the one whose name the CPU path goes by."""
    run_on_cpu: Callable[[Plan, Arrays], None]
    """Execute a plan made for the CPU; what is written is written in place."""
    reference: Callable[..., Any]
    """The semantics, in float64."""
    flops: Callable[[Problem], int]
    io_bytes: Callable[[Problem], int]
    describe: Callable[[Problem], str]
    plan_lines: Callable[[Plan], list[str]]
    """What a printed plan says of tiles and splits."""
    cpu_config: TileConfig
    """Tiles of the CPU path."""
    compiled: Callable[[KernelSpec, int], Any]
    """(kernel, head_dim) → problems whose builds `cufa compile` checks."""
    num_records: Callable[[Plan], int]
    """Most records that a trace build of a plan writes."""
    splits: bool = False
    """Keys of one item may be shared out over thread blocks (:class:`Split`)."""
    memory_bound: bool = False
    """Figures are bytes per second, not FLOPs."""
    further: tuple[Operand, ...] = ()
    """Operands that few calls have, behind all others: a call without any of them is told apart without looking at
    them."""
    by_keys: bool = False
    """Its blocks are blocks of keys, which visit tiles of queries (:class:`~cufa.schedule.schedule.Schedule`)."""

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Arguments that are read, in the order of the public call and of :attr:`operands`."""
        return tuple(x.name for x in self.operands if not x.result)

    @functools.cached_property
    def results(self) -> tuple[Operand, ...]:
        """What a call returns, in this order; behind the inputs in :attr:`operands`."""
        return tuple(x for x in self.operands if x.result)

    @functools.cached_property
    def every_operand(self) -> tuple[Operand, ...]:
        return self.operands + self.further

    @functools.cached_property
    def strided(self) -> tuple[bool, ...]:
        """Of each operand: are its rows read in wide copies, whatever the strides (or number by number)?"""
        return tuple(bool(x.stride) for x in self.every_operand)

    def operand(self, name: str) -> Operand:
        return next(x for x in self.every_operand if x.name == name)

    def in_order(self, given: Arrays) -> list[Any]:
        """The arrays of a call by the order of its operands, without the further ones where there is none."""
        further = [given.get(x.name) for x in self.further]
        found = [given.get(x.name) for x in self.operands]
        return found if all(x is None for x in further) else found + further


OPERATIONS: dict[str, Operation] = {}
"""By name; filled by the modules of ``cufa/ops``."""


def register(operation: Operation) -> Operation:
    OPERATIONS[operation.name] = operation
    return operation
