"""What cufa computes: one class per operation.

Planner, backends, executor, benchmark, records, commands and dashboard ask :data:`OPERATIONS`. A new operation is a
subclass of :class:`Operation`, its kernels, its CPU path (:mod:`cufa.run.cpu.run`) and its public calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..kernels import Kernel, Split, TileConfig
from ..kernels.params import Params, strides_of

if TYPE_CHECKING:
    from ..gpu.architectures import Device
    from ..problem.element import Element
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
    """The call returns this array, and allocates it unless the caller passes one."""
    like: str | Callable[[Problem], tuple[int, ...]] = ""
    """Results: the input with the same shape and dtype; or the shape of a contiguous array in the lse dtype."""
    nothing: float = 0.0
    """Results: the value if the problem has no score."""
    written: bool = False
    """Kernels may write to this array; True for every result."""
    mapped: bool = False
    """Hopper kernels read or write this array through a tensor map."""
    stride: str = ""
    """For arrays of four axes with any strides: the member that holds the strides of the first three axes, in
    elements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)
        object.__setattr__(self, "written", self.written or self.result)

    def element(self, problem: Problem) -> Element:
        """Element of a strided operand: k_cache and k_new hold what k does, gradients what q does."""
        return {
            "q": problem.q_element, "k": problem.k_element, "v": problem.v_element, "o": problem.out_element,
            "d": problem.q_element,
        }[self.stride[0]]  # fmt: skip

    @property
    def map_field(self) -> str:
        """Where the parameter structure keeps this operand's tensor map, if it does."""
        return self.stride.replace("_stride", "_map")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Tiles that `cufa tune` measured fastest for a class of problems."""

    config: TileConfig
    planned: TileConfig | None = None
    """The planner's own choice for the measured problem: for a problem with another choice, the measurement does not
    hold. None: not recorded."""
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
class Choice:
    """A planner's decision among the kernels that serve a problem."""

    spec: Kernel
    config: TileConfig
    reasons: tuple[str, ...] = ()
    split: Split | None = None


class Operation:
    """An operation: one subclass each, and one instance in :data:`OPERATIONS`."""

    name: str
    title: str
    operands: tuple[Operand, ...]
    """In the order in which launches take their addresses."""
    optional_operands: tuple[Operand, ...] = ()
    """After all other operands: the lookup of a warm call without any of them does not visit them."""
    params: Params
    """The parameter structure of its kernels."""
    cpu_config: TileConfig
    """Tiles of the CPU path."""
    splits: bool = False
    """Keys of one item may be shared out over thread blocks (:class:`~cufa.kernels.config.Split`)."""
    memory_bound: bool = False
    """Figures are bytes per second, not FLOPs."""

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        """Every scalar of the parameter structure, by member."""
        raise NotImplementedError

    def pack(self, plan: Plan, arrays: Arrays) -> Any:
        """The parameter structure, all but the pointers."""
        problem, params = plan.problem, self.params.new()
        for operand in self.operands:
            x = arrays[operand.name]
            if operand.stride and x is not None:
                setattr(params, operand.stride, strides_of(x.strides, operand.element(problem).itemsize))
        for name, value in self.scalars(plan, arrays).items():
            setattr(params, name, value)
        if "mask" in self.params.names:
            for name, number in problem.mask_params.items():
                if isinstance(number, int):
                    setattr(params.mask, name, number)
            params.mask.workspace = plan.workspace - problem.mask_bytes(plan.config.block_kv)
        return params

    def choose(
        self, problem: Problem, device: Device | None, serving: list[Kernel], request: Request
    ) -> Choice:
        """Kernel, tiles and splits, from the kernels that serve."""
        raise NotImplementedError

    def cpu_kernel(self, named: list[Kernel]) -> Kernel:
        """The kernel that a plan for the CPU names, of the kernels of one algorithm."""
        raise NotImplementedError

    def plan_lines(self, plan: Plan) -> list[str]:
        """The lines of a printed plan about tiles and splits."""
        raise NotImplementedError

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """Problems whose builds `cufa compile` checks."""
        raise NotImplementedError

    def num_records(self, plan: Plan) -> int:
        """Most records that a trace build of a plan writes."""
        raise NotImplementedError

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Arguments that are read, in the order of the public call and of :attr:`operands`."""
        return tuple(x.name for x in self.operands if not x.result)

    @functools.cached_property
    def results(self) -> tuple[Operand, ...]:
        """The results in the order of the returned tuple; after the inputs in :attr:`operands`."""
        return tuple(x for x in self.operands if x.result)

    @functools.cached_property
    def all_operands(self) -> tuple[Operand, ...]:
        return self.operands + self.optional_operands

    @functools.cached_property
    def strided(self) -> tuple[bool, ...]:
        """Per operand: whether kernels read its rows in wide copies, whatever the strides."""
        return tuple(bool(x.stride) for x in self.all_operands)

    def operand(self, name: str) -> Operand:
        return next(x for x in self.all_operands if x.name == name)

    def in_order(self, given: Arrays) -> list[Any]:
        """The arrays of a call in the order of its operands; without the optional ones if all of them are None."""
        optional = [given.get(x.name) for x in self.optional_operands]
        found = [given.get(x.name) for x in self.operands]
        return found if all(x is None for x in optional) else found + optional


OPERATIONS: dict[str, Operation] = {}
"""By name; filled by :mod:`cufa.plan.dense` and :mod:`cufa.plan.decode`."""

PER_HEAD = (Operand("alibi_slopes"), Operand("sink"))
"""The optional operands of decode."""
PER_HEAD_AND_LENGTHS = (
    *PER_HEAD,
    *map(Operand, ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")),
)
"""The optional operands of forward and backward."""


def stride_of_sequences(slopes: Any) -> int:
    """Elements from one sequence's slopes to the next one's; 0 if all sequences share them, or there are none."""
    return slopes.shape[1] if slopes is not None and slopes.ndim == 2 else 0
