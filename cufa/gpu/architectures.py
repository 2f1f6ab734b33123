"""Limits of the GPU architectures that kernels are planned and compiled for.

One table serves the planner (does a tile fit?) and the occupancy calculator. Figures: CUDA C++
Programming Guide, "Technical Specifications per Compute Capability"; tested against NVIDIA's
``cuda_occupancy.h``.
"""

from __future__ import annotations

import dataclasses

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Per-SM limits of one compute capability, plus a typical card for planning without a GPU."""

    capability: int
    """Compute capability as major*10 + minor."""
    max_warps: int
    """Resident warps per SM."""
    max_blocks: int
    """Resident thread blocks per SM."""
    shared_memory: int
    """Shared memory that an SM can give to blocks, bytes."""
    shared_memory_per_block: int
    """Largest shared memory of one block (after opting in), bytes."""
    typical_card: str
    typical_sms: int
    barriers: int | None = None
    """Named barriers per SM, where they limit how many blocks reside (sm_90 and later)."""
    registers: int = 65536
    """32-bit registers per SM, and the most a block may take."""
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    partitions: int = 4
    """Sub-cores of an SM: each has a quarter of the registers, and a warp lives in one of them."""
    register_granularity: int = 256
    """Registers are given to a warp in multiples of this (8 per thread)."""
    shared_memory_granularity: int = 128
    """Shared memory is given to a block in multiples of this many bytes."""
    reserved_shared_memory: int = 1 * KIB
    """Taken by the system from every block."""

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"

    @property
    def nvrtc_name(self) -> str:
        """The -arch value kernels are compiled with: Hopper's own instructions need the 'a' target."""
        return "sm_90a" if self.capability == 90 else self.name


ARCHITECTURES = {
    arch.capability: arch
    for arch in (
        Architecture(80, 64, 32, 164 * KIB, 163 * KIB, "A100", 108),
        Architecture(86, 48, 16, 100 * KIB, 99 * KIB, "A10G", 80),
        Architecture(87, 48, 16, 164 * KIB, 163 * KIB, "Jetson Orin", 16),
        Architecture(89, 48, 24, 100 * KIB, 99 * KIB, "RTX 4090", 128),
        Architecture(90, 64, 32, 228 * KIB, 227 * KIB, "H200", 132, barriers=64),
        Architecture(100, 64, 32, 228 * KIB, 227 * KIB, "B200", 148, barriers=64),
        Architecture(120, 48, 24, 100 * KIB, 99 * KIB, "RTX 5090", 170, barriers=24),
    )
}

#: What `cufa compile` and CI build for.
COMPILED_ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def find_architecture(name: str | int) -> Architecture:
    """Architecture for ``90``, ``"90"``, ``"sm_90"`` or ``"sm_90a"``; for a capability that is not in
    the table, the newest one of the same major version below it.

    Raises ValueError for a GPU older than sm_80.
    """
    text = str(name).removeprefix("sm_").rstrip("af")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"architecture {name!r} is not known; use one of {_known()}, e.g. 'sm_90'")
    capability = int(text)
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    older = [c for c in ARCHITECTURES if c // 10 == capability // 10 and c < capability]
    if not older:
        raise ValueError(f"architecture sm_{capability} is not supported: cufa needs one of {_known()}")
    return ARCHITECTURES[max(older)]


def _known() -> str:
    return ", ".join(a.name for a in ARCHITECTURES.values())


@dataclasses.dataclass(frozen=True)
class Device:
    """The GPU that a plan is made for: a real one, or an architecture's typical card."""

    name: str
    arch: Architecture
    num_sms: int

    @property
    def slow_memory(self) -> bool:
        """Less memory bandwidth per SM than an H200: an H100 has the same number of SMs, but 3.35 TB/s, not 4.8."""
        return "H100" in self.name

    @classmethod
    def typical(cls, arch: str | int) -> Device:
        found = find_architecture(arch)
        return cls(found.typical_card, found, found.typical_sms)
