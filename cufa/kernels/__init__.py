"""The registry: every kernel, as an instance of its class.

Planner, compiler, tests, benchmark, command line and dashboard iterate :data:`KERNELS`. A new kernel is a folder under
``cuda_src``, a class in the file of the same stem here, and a line below. Nothing here needs a GPU or CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .backward.fa2 import Fa2Backward
from .backward.fa2_f32 import Fa2BackwardF32
from .backward.fa3 import Fa3Backward
from .backward.fa3_pair import Fa3BackwardWide
from .base import Kernel
from .config import Box, Launch, Split, TileConfig
from .decode import DECODE
from .forward.fa1 import Fa1Forward
from .forward.fa1_f32 import Fa1ForwardF32
from .forward.fa2 import Fa2Forward, Fa2NoSkip
from .forward.fa2_f32 import Fa2ForwardF32, Fa2NoSkipF32
from .forward.fa2_fp8 import Fa2ForwardFp8
from .forward.fa3 import Fa3Forward
from .forward.fa3_fp8 import Fa3ForwardFp8
from .forward.naive import Naive

__all__ = [
    "KERNELS", "Box", "Kernel", "Launch", "Split", "TileConfig", "kernels_of", "read_config",
]  # fmt: skip

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Fa3Forward(),
        Fa3ForwardFp8(),
        Fa2Forward(),
        Fa2ForwardFp8(),
        Fa2NoSkip(),
        Fa2ForwardF32(),
        Fa2NoSkipF32(),
        Fa1Forward(),
        Fa1ForwardF32(),
        Naive(),
        *DECODE,
        Fa3Backward(),
        Fa3BackwardWide(),
        Fa2Backward(),
        Fa2BackwardF32(),
    )
}
"""By name; the kernels of one operation are in order of preference, for classes of problems without a measurement."""


def kernels_of(operation: str) -> dict[str, Kernel]:
    """The kernels of one operation, by name."""
    return {name: kernel for name, kernel in KERNELS.items() if kernel.operation == operation}


def read_config(operation: str, algorithm: str, content: Mapping[str, Any]) -> TileConfig:
    """A config from JSON, of the kernels of one algorithm: these share a class of configs.

    Raises ValueError for an unknown algorithm, TypeError for fields that are not those of the class.
    """
    kernels = [kernel for kernel in kernels_of(operation).values() if kernel.algorithm == algorithm]
    if not kernels:
        raise ValueError(
            f"algorithm={algorithm!r} of {operation} is not known: a config needs the kernel's name"
        )
    return kernels[0].read_config(content)
