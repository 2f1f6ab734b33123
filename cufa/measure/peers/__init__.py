"""Other libraries, timed on the same inputs in the same run. Used when they are there, never required.

A *family* is what ``cufa bench --peers`` names: one library, with one or more contenders. Each is a module here with
``make(name, problem, arrays)``, which returns (run, results): ``run`` launches on CuPy's current stream, ``results``
computes once and returns CuPy arrays by their role. The inputs are those of :class:`cufa.measure.inputs.Inputs`: CuPy
arrays in the order (batch, heads, seqlen, head_dim). With a gradient of the output among them, ``dout``, it is the
gradients of q, k and v that are computed.

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
    """Names of its contenders, as rows and suites have them."""
    module: ModuleType
    packages: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"torch": "torch"})
    """What it imports, and the name to install each by."""

    @property
    def missing(self) -> str:
        """Why it cannot be used here; "" when it can, as far as one sees without a GPU."""
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
PEERS = tuple(name for family in FAMILIES.values() for name in family.peers)


def here() -> tuple[str, ...]:
    """Names of the peers whose libraries are installed."""
    return tuple(name for family in FAMILIES.values() if not family.missing for name in family.peers)


def family_of(name: str) -> Family:
    """Raises KeyError when it is no peer's name."""
    return next(family for family in FAMILIES.values() if name in family.peers)


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tuple[Run, Callable[[], dict[str, Any]]]:
    """(run, results) of one peer. Raises NotImplementedError where it is missing or does not serve."""
    family = family_of(name)
    if family.missing:
        raise NotImplementedError(family.missing)
    if problem.lengths.kind != "dense":
        raise NotImplementedError(f"{problem.lengths.kind} sequences are not handed to other libraries here")
    run, results = family.module.make(name, problem, arrays)
    return run, results
