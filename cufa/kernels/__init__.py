"""The registry: every kernel as one literal.

The API, planner, compiler, tests, benchmark, command line and dashboard iterate :data:`KERNELS`,
:data:`DECODE_KERNELS` or both, :data:`REGISTRY`.
Adding a kernel is one file under ``cuda_src/kernels`` and one literal beside this file. Nothing here needs a
GPU or CuPy.
"""

from __future__ import annotations

import dataclasses

from .decode import DECODE
from .fa1 import FA1_FORWARD
from .fa2 import FA2_FORWARD
from .fa2_f32 import FA2_FORWARD_F32
from .fa3 import FA3_FORWARD
from .naive import NAIVE
from .spec import KernelSpec, Launch, TileConfig

__all__ = ["DECODE_KERNELS", "KERNELS", "REGISTRY", "KernelSpec", "Launch", "TileConfig"]

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
            title="FlashAttention-2 forward without causal skipping",
            skip_masked_tiles=False,
        ),
        FA2_FORWARD_F32,
        dataclasses.replace(
            FA2_FORWARD_F32,
            name="fa2_noskip_f32",
            algorithm="fa2_noskip",
            title="FlashAttention-2 forward without causal skipping, float32 as pairs of float16",
            skip_masked_tiles=False,
        ),
        FA1_FORWARD,
        NAIVE,
    )
}
"""Of ``flash_attention``, in order of preference: ``algorithm="auto"`` takes the first that serves."""

DECODE_KERNELS: dict[str, KernelSpec] = {spec.name: spec for spec in DECODE}
"""Of ``flash_decode``, likewise: the first that serves the problem, of the schedule chosen."""

REGISTRY: dict[str, KernelSpec] = {**KERNELS, **DECODE_KERNELS}
"""All: what is compiled, packaged and recorded."""
