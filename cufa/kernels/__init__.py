"""The registry: every kernel as one literal.

Planner, compiler, tests, benchmark, command line and dashboard iterate :data:`KERNELS`. Adding a kernel is one
file under ``cuda_src/kernels`` and one literal beside this file. Nothing here needs a GPU or CuPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..problem.problem import BAND_KINDS
from .backward.fa2 import FA2_BACKWARD, FA2_BACKWARD_F32
from .backward.fa3 import FA3_BACKWARD
from .backward.fa3_pair import FA3_BACKWARD_WIDE
from .base import Box, KernelSpec, Launch
from .config import TileConfig
from .decode import DECODE
from .forward.fa1 import FA1_FORWARD, FA1_FORWARD_F32
from .forward.fa2 import FA2_FORWARD
from .forward.fa2_f32 import FA2_FORWARD_F32
from .forward.fa3 import FA3_FORWARD
from .forward.naive import NAIVE

__all__ = ["KERNELS", "Box", "KernelSpec", "Launch", "TileConfig", "kernels_of", "read_config", "register"]

KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        FA3_FORWARD,
        FA2_FORWARD,
        # The ablation: the same source, wholly masked tiles computed and thrown away by the mask.
        dataclasses.replace(
            FA2_FORWARD,
            name="fa2_noskip",
            algorithm="fa2_noskip",
            title="FlashAttention-2 forward without skipping of masked tiles",
            masks=BAND_KINDS,
            skip_masked_tiles=False,
            split_configs=(),
        ),
        FA2_FORWARD_F32,
        dataclasses.replace(
            FA2_FORWARD_F32,
            name="fa2_noskip_f32",
            algorithm="fa2_noskip",
            title="FlashAttention-2 forward without skipping of masked tiles, float32 as pairs of float16",
            masks=BAND_KINDS,
            skip_masked_tiles=False,
        ),
        FA1_FORWARD,
        FA1_FORWARD_F32,
        NAIVE,
        *DECODE,
        FA3_BACKWARD,
        FA3_BACKWARD_WIDE,
        FA2_BACKWARD,
        FA2_BACKWARD_F32,
    )
}
"""By name, those of one operation in order of preference where nothing was measured."""


def kernels_of(operation: str) -> dict[str, KernelSpec]:
    """The kernels of one operation, by name."""
    return {name: spec for name, spec in KERNELS.items() if spec.operation == operation}


def read_config(operation: str, algorithm: str, content: Mapping[str, Any]) -> TileConfig:
    """A config from JSON whose kernel is known by what a call names: those of one algorithm share a class of configs.

    Raises ValueError when no kernel has the name, TypeError when the content is no config of its class.
    """
    specs = [spec for spec in kernels_of(operation).values() if spec.algorithm == algorithm]
    if not specs:
        raise ValueError(
            f"algorithm={algorithm!r} of {operation} is not known: a config needs the kernel's name"
        )
    return specs[0].read_config(content)


def register(spec: KernelSpec) -> KernelSpec:
    """Add a kernel: what is registered later is preferred less."""
    KERNELS[spec.name] = spec
    return spec
