"""What cufa computes: one class per operation.

Planner, backends, executor, benchmarks, commands and dashboard look operations up in :data:`OPERATIONS`. A new
operation needs a subclass of :class:`Operation`, kernels, a CPU path (:mod:`cufa.run.cpu.run`) and public calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels import Kernel, Split, TileConfig
from ..kernels.params import Params, strides_of
from ..problem.element import ELEMENTS, Element
from ..problem.score_function import MAX_ARRAYS, MAX_AXES

if TYPE_CHECKING:
    from ..gpu.architectures import Device
    from ..problem.problem import Problem
    from .planner import Plan

Arrays = Mapping[str, Any]
"""The arrays of one call by operand name, in canonical axis order; None for an argument that was not passed."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a call. Signatures, checks, parameter structures, tensor maps and the executor's guards are derived
    from this declaration."""

    name: str
    """Argument of the public call."""
    field: str = ""
    """The pointer's member in the parameter structure. Default: the argument's name."""
    result: bool = False
    """The call returns this array, and allocates the array unless the caller passes one."""
    like: str | Callable[[Problem], tuple[int, ...]] = ""
    """Results: the name of the input with the same shape and dtype; or a function that returns the shape of a
    contiguous array in the lse dtype."""
    nothing: float = 0.0
    """Results: the value of every element if no query sees a key."""
    written: bool = False
    """Kernels may write to this array; True for every result."""
    mapped: bool = False
    """Hopper kernels read or write this array through a tensor map."""
    stride: str = ""
    """For arrays of four axes with any strides: the parameter structure's member with the strides of the first three
    axes, in elements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)
        object.__setattr__(self, "written", self.written or self.result)

    def element(self, problem: Problem) -> Element:
        """Element of a strided operand, by the first letter of its stride member: k_cache and k_new have the element of
        k, gradients the element of q (or float32), and new tokens that the call quantises have the element of q."""
        if self.name in ("k_new", "v_new") and problem.cache.quantize_new:
            return problem.q_element
        if self.name in problem.float32_gradients:
            return ELEMENTS["float32"]
        return {
            "q": problem.q_element, "k": problem.k_element, "v": problem.v_element, "o": problem.out_element,
            "d": problem.q_element,
        }[self.stride[0]]  # fmt: skip

    @property
    def map_field(self) -> str:
        """The parameter structure's member for this operand's tensor map; not every structure has it."""
        return self.stride.replace("_stride", "_map")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Tiles that `cufa tune` measured fastest for a class of problems."""

    config: TileConfig
    planned: TileConfig | None = None
    """The planner's own choice for the measured problem. If the planner chooses other tiles for a problem, the
    measurement does not apply. None: not recorded."""
    found: str = "measured fastest by `cufa tune`"
    """Printed with the plan: on which card, when, and by how much these tiles were faster."""
    cut: tuple[str, int] | None = None
    """Decode: schedule, and number of splits or shares."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The caller's arguments to the planner, except the problem."""

    algorithm: str = "auto"
    config: TileConfig | None = None
    num_splits: int | None = None
    tuned: Mapping[str, Tuned] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The planner's decision: a kernel that serves the problem, its tiles, and how keys are split."""

    spec: Kernel
    config: TileConfig
    reasons: tuple[str, ...] = ()
    split: Split | None = None


class Operation:
    """Base class: an operation is a subclass with one instance in :data:`OPERATIONS`."""

    name: str
    title: str
    operands: tuple[Operand, ...]
    """In the order in which launches take their addresses."""
    optional_operands: tuple[Operand, ...] = ()
    """Follow all other operands. A warm call that passes no optional operand skips them in its lookup."""
    params: Params
    """The parameter structure for most problems: see :meth:`params_of`."""
    cpu_config: TileConfig
    """Tiles of the CPU path."""
    split_selects_kernel: bool = False
    """Every plan has a :class:`~cufa.kernels.config.Split`, and its kind selects the kernel (decode). Other operations
    split keys only if ``num_splits`` or the planner's estimate asks for it."""
    memory_bound: bool = False
    """Rates are reported in bytes per second instead of FLOP/s."""

    def params_of(self, problem: Problem) -> Params:
        """The parameter structure of the kernels that serve a problem."""
        return self.params

    def scalars(self, plan: Plan, arrays: Arrays) -> dict[str, int | float]:
        """Every scalar of the parameter structure, by member."""
        raise NotImplementedError

    def pack(self, plan: Plan, arrays: Arrays) -> Any:
        """The filled parameter structure, except the pointers."""
        problem, params = plan.problem, plan.params.new()
        for operand in self.all_operands:
            x = arrays.get(operand.name)
            if operand.stride and x is not None:
                setattr(params, operand.stride, strides_of(x.strides, operand.element(problem).itemsize))
        for name, value in self.scalars(plan, arrays).items():
            setattr(params, name, value)
        for n, operand in enumerate(SCORE_ARRAYS):
            if (x := arrays.get(operand.name)) is not None:
                array = getattr(params, f"array{n}")
                for axis in range(MAX_AXES):
                    setattr(array, f"stride{axis}", x.strides[axis] // x.itemsize if axis < x.ndim else 0)
                    setattr(array, f"size{axis}", x.shape[axis] if axis < x.ndim else 1)
        if "mask" in plan.params.names:
            for name, number in problem.mask_params.items():
                if isinstance(number, int):
                    setattr(params.mask, name, number)
            params.mask.workspace = plan.workspace - problem.mask_bytes(
                plan.config.block_q, plan.config.block_kv
            )
        return params

    @staticmethod
    def mask_members(params: Any) -> Any:
        """The part of a parameter structure that has the pointers of :attr:`Problem.mask_arrays`."""
        return params.mask

    def choose(
        self, problem: Problem, device: Device | None, serving: list[Kernel], request: Request
    ) -> Choice:
        """Choose kernel, tiles and splits. ``serving``: the kernels that serve the problem, in order of preference."""
        raise NotImplementedError

    def cpu_kernel(self, named: list[Kernel]) -> Kernel:
        """The kernel that a CPU plan names. ``named``: the kernels of one algorithm."""
        raise NotImplementedError

    def plan_lines(self, plan: Plan) -> list[str]:
        """Lines about tiles and splits for the printed plan."""
        raise NotImplementedError

    def compiled(self, kernel: Kernel, head_dim: int) -> Iterator[Problem]:
        """Problems whose builds `cufa compile` checks."""
        raise NotImplementedError

    def num_records(self, plan: Plan) -> int:
        """Most trace records that a trace build writes for a plan."""
        raise NotImplementedError

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments that are not results, in the order of the public call and of :attr:`operands`."""
        return tuple(x.name for x in self.operands if not x.result)

    @functools.cached_property
    def results(self) -> tuple[Operand, ...]:
        """The results in the order of the returned tuple. In :attr:`operands` they follow the inputs."""
        return tuple(x for x in self.operands if x.result)

    @functools.cached_property
    def all_operands(self) -> tuple[Operand, ...]:
        return self.operands + self.optional_operands

    @functools.cached_property
    def strided(self) -> tuple[bool, ...]:
        """Per operand: whether kernels copy its rows. The array's address then decides how wide the copies may be."""
        return tuple(bool(x.stride) for x in self.all_operands)

    def optional_places(self, params: Params) -> list[tuple[int, int]]:
        """(index among all operands, byte offset of the pointer in the structure) of each optional operand that a
        parameter structure has."""
        optional = enumerate(self.optional_operands, len(self.operands))
        return [(place, params.offset(x.field)) for place, x in optional if x.field in params.names]

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The index of each operand among all operands, by name."""
        return {x.name: place for place, x in enumerate(self.all_operands)}

    def placed(self, given: Sequence[Any], first: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The operands ``given``, in order, with ``arrays`` in place of the operand ``first`` and the operands after
        it. Missing operands before ``first`` are None."""
        place = self.places[first]
        missing = (None,) * (place - len(given))
        return (*given[:place], *missing, *arrays, *given[place + len(arrays) :])

    def operand(self, name: str) -> Operand:
        return next(x for x in self.all_operands if x.name == name)

    def in_order(self, given: Arrays) -> list[Any]:
        """The arrays of a call in the order of its operands. If all optional operands are None, they are left out."""
        optional = [given.get(x.name) for x in self.optional_operands]
        found = [given.get(x.name) for x in self.operands]
        return found if all(x is None for x in optional) else found + optional


OPERATIONS: dict[str, Operation] = {}
"""Operations by name; filled by :mod:`cufa.plan.dense` and :mod:`cufa.plan.decode`."""

PER_HEAD = (Operand("alibi_slopes"), Operand("sink"))
"""Slopes and sinks: optional operands of every operation."""
PER_HEAD_AND_LENGTHS = (
    *PER_HEAD,
    *map(Operand, ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")),
)
"""The optional operands of forward and backward."""


SCORE_ARRAYS = tuple(Operand(f"score{n}") for n in range(MAX_ARRAYS))
"""The arrays of a score function, in its order."""


def _shape_of_array(n: int, problem: Problem) -> tuple[int, ...]:
    assert problem.score is not None
    return problem.score.shapes[n]


SCORE_GRADIENTS = tuple(
    Operand(f"dscore{n}", result=True, like=functools.partial(_shape_of_array, n)) for n in range(MAX_ARRAYS)
)

SEED = Operand("seed")
"""Dropout: two 64-bit integers."""

RUNNING = (Operand("running", written=True), Operand("running_lse", written=True))
"""The optional operands of a forward that joins a running result: O, (batch, heads, seqlen_q, head_dim), and lse, in
float32, of any strides with a contiguous last axis."""

CACHE = (
    Operand("cache_seqlens"),
    Operand("block_table"),
    Operand("k_new", stride="k_new_stride"),
    Operand("v_new", stride="v_new_stride"),
    Operand("tree"),
)
"""The optional operands of a forward whose keys are in a cache."""


SCALES = tuple(map(Operand, ("q_scale", "k_scale", "v_scale")))
"""The optional operands of a forward of e4m3, which has all three."""


def stride_of_sequences(slopes: Any) -> int:
    """Elements between the slopes of consecutive sequences; 0 if all sequences share the slopes, or without ALiBi."""
    return slopes.shape[1] if slopes is not None and slopes.ndim == 2 else 0
