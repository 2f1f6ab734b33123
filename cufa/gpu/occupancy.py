"""Theoretical occupancy: how many blocks and warps of a kernel fit on one SM, and what stops one more.

The arithmetic is NVIDIA's, allocation granularity included, and is tested against their
``cuda_occupancy.h``. Plain division overstates it: 138 registers per thread are 65536 / (138 · 32) = 14
warps on paper. But a warp gets its registers in steps of 256, from its sub-core's quarter of the register
file: only 4 · ⌊16384 / 4608⌋ = 12 warps fit. :attr:`Occupancy.unrounded_warps` keeps the figure
on paper.

Assumed: the driver gives shared memory its largest share of the L1 (it does when a kernel asks for it),
and no other kernel runs on the SM.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from .architectures import Architecture

WARP_SIZE = 32

#: In :attr:`Occupancy.limits`: the resource sets no limit.
UNLIMITED = 2**31 - 1


class Resource(enum.StrEnum):
    """The resources of an SM that limit its blocks."""

    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    WARPS = "warps"
    BLOCKS = "blocks"
    BARRIERS = "barriers"


@dataclasses.dataclass(frozen=True)
class Needs:
    """The most that a block may use for ``blocks`` of them to fit on an SM."""

    blocks: int
    registers: int | None
    """Per thread; None: registers are not the limit."""
    shared_memory: int | None
    """Bytes per block, static and dynamic; None: shared memory is not the limit."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks of one kernel that reside on one SM at a time."""

    arch: Architecture
    registers: int
    """Per thread."""
    threads: int
    """Per block."""
    shared_memory: int
    """Bytes a block asks for, static and dynamic, without what the system reserves."""
    limits: Mapping[Resource, int]
    """Blocks per SM that each resource alone would allow."""

    @property
    def blocks(self) -> int:
        """Blocks per SM; 0: the kernel cannot be launched."""
        return min(self.limits.values())

    @property
    def limiters(self) -> tuple[Resource, ...]:
        """The resources that run out first."""
        return tuple(r for r, limit in self.limits.items() if limit == self.blocks)

    @property
    def warps_per_block(self) -> int:
        return _ceil_div(self.threads, WARP_SIZE)

    @property
    def warps(self) -> int:
        """Resident warps per SM."""
        return self.blocks * self.warps_per_block

    @property
    def fraction(self) -> float:
        """Resident warps over the most an SM can hold: theoretical occupancy, 0 to 1."""
        return self.warps / self.arch.max_warps

    @property
    def granted_registers(self) -> int:
        """Registers that a block gets, rounded as the hardware gives them to its warps."""
        return _round_up(self.registers * WARP_SIZE, self.arch.register_granularity) * self.warps_per_block

    @property
    def granted_shared_memory(self) -> int:
        """Bytes of shared memory that a block gets, with what the system reserves."""
        return _round_up(
            self.shared_memory + self.arch.reserved_shared_memory, self.arch.shared_memory_granularity
        )

    @property
    def unrounded_warps(self) -> int:
        """Warps per SM if only registers counted and were given without rounding: the figure on paper."""
        return min(self.arch.registers // (self.registers * WARP_SIZE), self.arch.max_warps)

    @property
    def one_more_block(self) -> Needs | None:
        """The limits within which one more block fits; None if fewer registers or bytes do not help."""
        target = self.blocks + 1
        fixable = (Resource.REGISTERS, Resource.SHARED_MEMORY)
        if any(limit < target for r, limit in self.limits.items() if r not in fixable):
            return None
        registers = shared_memory = None
        if self.limits[Resource.REGISTERS] < target:
            registers = _most_registers(self.arch, self.warps_per_block, target)
        if self.limits[Resource.SHARED_MEMORY] < target:
            shared_memory = _most_shared_memory(self.arch, target)
        return Needs(target, registers, shared_memory)

    @property
    def advice(self) -> str:
        """:attr:`one_more_block` in words: ``"registers 168 → 160"``; empty when nothing helps."""
        needs = self.one_more_block
        if needs is None:
            return ""
        parts = []
        if needs.registers is not None:
            parts.append(f"registers {self.registers} → {needs.registers}")
        if needs.shared_memory is not None:
            parts.append(f"shared memory {self.shared_memory:,} → {needs.shared_memory:,} B")
        return ", ".join(parts)


def occupancy(
    arch: Architecture, *, registers: int, threads: int, shared_memory: int = 0, barriers: int = 1
) -> Occupancy:
    """Theoretical occupancy of a kernel.

    ``registers`` per thread and ``barriers`` (named barriers, as ptxas counts them) come from a compile,
    ``threads`` and ``shared_memory`` (bytes, static and dynamic) are those of one block.

    Raises ValueError for figures that no kernel can have.
    """
    for name, value, lowest in (
        ("registers", registers, 1),
        ("threads", threads, 1),
        ("shared_memory", shared_memory, 0),
        ("barriers", barriers, 0),
    ):
        if value < lowest:
            raise ValueError(f"{name}={value} is not possible: it must be at least {lowest}")
    warps = _ceil_div(threads, WARP_SIZE)
    limits = {
        Resource.REGISTERS: _register_limit(arch, registers, warps),
        Resource.SHARED_MEMORY: _shared_memory_limit(arch, shared_memory),
        Resource.WARPS: arch.max_warps // warps if threads <= arch.max_threads_per_block else 0,
        Resource.BLOCKS: arch.max_blocks,
        Resource.BARRIERS: UNLIMITED if arch.barriers is None or not barriers else arch.barriers // barriers,
    }
    return Occupancy(arch, registers, threads, shared_memory, limits)


def _register_limit(arch: Architecture, registers: int, warps: int) -> int:
    if registers > arch.max_registers_per_thread:
        return 0
    per_warp = _round_up(registers * WARP_SIZE, arch.register_granularity)
    warps_per_partition = arch.registers // arch.partitions // per_warp
    return warps_per_partition * arch.partitions // warps


def _most_registers(arch: Architecture, warps: int, blocks: int) -> int:
    """The inverse of :func:`_register_limit`: registers per thread with which ``blocks`` still fit."""
    warps_per_partition = _ceil_div(blocks * warps, arch.partitions)
    per_warp = _round_down(
        arch.registers // arch.partitions // warps_per_partition, arch.register_granularity
    )
    return min(per_warp // WARP_SIZE, arch.max_registers_per_thread)


def _shared_memory_limit(arch: Architecture, shared_memory: int) -> int:
    if shared_memory > arch.shared_memory_per_block:
        return 0
    granted = _round_up(shared_memory + arch.reserved_shared_memory, arch.shared_memory_granularity)
    return arch.shared_memory // granted


def _most_shared_memory(arch: Architecture, blocks: int) -> int:
    """The inverse of :func:`_shared_memory_limit`: bytes per block with which ``blocks`` still fit."""
    granted = _round_down(arch.shared_memory // blocks, arch.shared_memory_granularity)
    return min(granted - arch.reserved_shared_memory, arch.shared_memory_per_block)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, step: int) -> int:
    return _ceil_div(value, step) * step


def _round_down(value: int, step: int) -> int:
    return value // step * step
