"""Other libraries, timed on the same inputs in the same run, if they are installed.

A *family* is one library, with one or more contenders; ``cufa bench --peers`` takes its name. Its module here has
``make(name, problem, arrays)``, which returns (run, results): ``run`` launches on CuPy's current stream, ``results``
computes once and returns CuPy arrays by role. ``arrays`` come from :class:`cufa.measure.inputs.Inputs`: CuPy arrays of
shape (batch, heads, seqlen, head_dim). If ``arrays`` has ``dout``, a gradient of the output, the peer computes the
gradients of q, k and v.

``make`` raises NotImplementedError, with a reason, for a problem that the peer does not serve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...problem.checks import importable
from ...problem.problem import Problem
from ..timing import Run
from . import fa4, flex, sdpa


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    title: str
    peers: tuple[str, ...]
    """Names of its contenders: the labels of their rows."""
    module: ModuleType
    packages: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"torch": "torch"})
    """Modules that it imports, and the package to install for each."""

    @property
    def missing(self) -> str:
        """The first package that is not installed, in a sentence; "" if all are."""
        lacking = (package for name, package in self.packages.items() if not importable(name))
        return next((f"{package} is not installed" for package in lacking), "")


_CUTE = {"torch": "torch", "flash_attn.cute": "flash-attn-4"}
FAMILIES = {
    family.name: family
    for family in (
        Family("torch", "torch's scaled_dot_product_attention", tuple(sdpa.BACKENDS), sdpa),
        Family("flex", "torch's compiled FlexAttention", ("flex",), flex),
        Family("flex-flash", "torch's FlexAttention on FlashAttention-4", ("flex flash",), flex, _CUTE),
        Family("fa4", "FlashAttention-4 (CuTe)", ("fa4",), fa4, _CUTE),
    )
}
_FAMILY_OF = {name: family for family in FAMILIES.values() for name in family.peers}
PEERS = tuple(_FAMILY_OF)


def here() -> tuple[str, ...]:
    """Names of the peers whose libraries are installed."""
    return tuple(name for name, family in _FAMILY_OF.items() if not family.missing)


def family_of(name: str) -> Family:
    """The family of a peer. Raises KeyError for other names."""
    return _FAMILY_OF[name]


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tuple[Run, Callable[[], dict[str, Any]]]:
    """(run, results) of one peer. Raises NotImplementedError if it is not installed or does not serve the problem."""
    family = family_of(name)
    if family.missing:
        raise NotImplementedError(family.missing)
    if problem.lengths.kind != "dense":
        raise NotImplementedError(f"other libraries are not measured with {problem.lengths.kind} sequences")
    run, results = family.module.make(name, problem, arrays)
    return run, results
