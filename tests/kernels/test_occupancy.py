"""Occupancy against NVIDIA's own calculator, ``cuda_occupancy.h``, compiled here with g++."""

from __future__ import annotations

import importlib.metadata
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cufa.gpu.architectures import ARCHITECTURES, KIB, Architecture
from cufa.gpu.occupancy import WARP_SIZE, Occupancy, Resource, occupancy

# One line in (device, then kernel), one line out (blocks, then the limit of each resource).
ORACLE_SOURCE = r"""
#include <cstdio>
#include "cuda_occupancy.h"

int main() {
  int cc, warps, smem_sm, smem_block, regs, threads, static_smem, dynamic_smem, barriers;
  while (std::scanf("%d %d %d %d %d %d %d %d %d", &cc, &warps, &smem_sm, &smem_block, &regs, &threads,
                    &static_smem, &dynamic_smem, &barriers) == 9) {
    cudaOccDeviceProp device;
    device.computeMajor = cc / 10;
    device.computeMinor = cc % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = warps * 32;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = smem_sm;
    device.sharedMemPerBlockOptin = smem_block;
    device.reservedSharedMemPerBlock = 1024;
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = regs;
    kernel.sharedSizeBytes = static_smem;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = dynamic_smem;
    kernel.numBlockBarriers = barriers;
    cudaOccDeviceState state;
    cudaOccResult r;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &device, &kernel, &state, threads, dynamic_smem);
    if (error) { std::printf("error %d\n", error); continue; }
    std::printf("%d %d %d %d %d %d\n", r.activeBlocksPerMultiprocessor, r.blockLimitRegs,
                r.blockLimitSharedMem, r.blockLimitWarps, r.blockLimitBlocks, r.blockLimitBarriers);
  }
}
"""

Point = tuple[Architecture, int, int, int, int, int]
"""(arch, registers, threads, static bytes, dynamic bytes, barriers)"""


def _nvidia_header() -> Path | None:
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuda_occupancy.h":
                return Path(str(file.locate()))
    return None


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Point]], list[list[int]]]:
    header = _nvidia_header()
    if header is None:
        pytest.skip("cuda_occupancy.h is not installed: pip install nvidia-cuda-runtime")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "oracle.cpp").write_text(ORACLE_SOURCE)
    program = folder / "oracle"
    subprocess.run(["g++", "-O1", f"-I{header.parent}", folder / "oracle.cpp", "-o", program], check=True)

    def ask(points: list[Point]) -> list[list[int]]:
        lines = [
            f"{a.capability} {a.max_warps} {a.shared_memory} {a.shared_memory_per_block} {r} {t} {s} {d} {b}"
            for a, r, t, s, d, b in points
        ]
        answer = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
        rows = answer.stdout.splitlines()
        assert len(rows) == len(points)
        return [[int(word) for word in row.split()] for row in rows]  # "error n" raises

    return ask


def _ours(point: Point) -> Occupancy:
    arch, registers, threads, static, dynamic, barriers = point
    return occupancy(
        arch, registers=registers, threads=threads, shared_memory=static + dynamic, barriers=barriers
    )


def _points(arch: Architecture) -> list[Point]:
    """Every number of registers with numbers of threads, every edge of shared memory, and 5,000 at random."""
    threads = (1, 32, 33, 64, 96, 128, 160, 192, 224, 256, 288, 384, 416, 512, 640, 768, 1000, 1024)
    points = [(arch, registers, n, 0, 0, 1) for registers in range(1, 256) for n in threads]
    edges = range(0, arch.shared_memory + 2 * KIB, 128)
    points += [(arch, 32, 128, 0, max(0, size + off), 1) for size in edges for off in (-1, 0, 1)]
    rng = random.Random(arch.capability)
    return points + [
        (
            arch,
            rng.randint(1, 255),
            rng.randint(1, 1056),
            rng.choice((0, rng.randint(0, 47 * KIB))),
            rng.choice((0, rng.randint(0, 16 * KIB), rng.randint(0, 230 * KIB))),
            rng.randint(0, 16),
        )
        for _ in range(5000)
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_equals_nvidia(arch, oracle):
    points = _points(arch)
    for point, answer in zip(points, oracle(points), strict=True):
        ours = _ours(point)
        assert [ours.blocks, *ours.limits.values()] == answer, point
    assert {_ours(p).blocks for p in points} >= {0, 1, 2, 3, 5, 8}  # not all one answer


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_one_more_block_is_enough_and_no_more_than_needed(arch):
    rng = random.Random(arch.capability)
    helped = 0
    for _ in range(2000):
        threads = 32 * rng.randint(1, 16)
        now = occupancy(
            arch,
            registers=rng.randint(24, 255),
            threads=threads,
            shared_memory=rng.choice((0, rng.randint(0, arch.shared_memory_per_block))),
        )
        needs = now.one_more_block
        if needs is None:
            assert set(now.limiters) & {Resource.WARPS, Resource.BLOCKS, Resource.BARRIERS}
            assert now.advice == ""
            continue
        helped += 1
        registers = now.registers if needs.registers is None else needs.registers
        shared_memory = now.shared_memory if needs.shared_memory is None else needs.shared_memory
        assert needs.blocks == now.blocks + 1
        assert registers <= now.registers
        assert shared_memory <= now.shared_memory

        def blocks(registers: int, shared_memory: int, threads: int = threads) -> int:
            return occupancy(arch, registers=registers, threads=threads, shared_memory=shared_memory).blocks

        assert blocks(registers, shared_memory) >= needs.blocks
        if needs.registers is not None:
            assert blocks(registers + 1, shared_memory) < needs.blocks
        if needs.shared_memory is not None:
            assert blocks(registers, shared_memory + 1) < needs.blocks
    assert helped > 500


A10G = ARCHITECTURES[86]


def test_registers_are_rounded_to_what_warps_get():
    """Of two Triton kernels in a well-known write-up that divides without rounding: 138 registers are given as 144
    (steps of 256 a warp), three warps to each quarter of the register file. 14 warps on paper, 12 on the card."""
    found = occupancy(A10G, registers=138, threads=128)
    assert (found.unrounded_warps, found.warps, found.limiters) == (14, 12, (Resource.REGISTERS,))
    assert round(100 * found.fraction, 1) == 25.0
    found = occupancy(A10G, registers=247, threads=128)  # given as 248, two warps a quarter: nothing is lost
    assert found.unrounded_warps == found.warps == 8
    # Full occupancy needs 40 registers, not the 42 that a division gives: those are given as 48.
    assert A10G.registers // (A10G.max_warps * WARP_SIZE) == 42
    assert [occupancy(A10G, registers=n, threads=128).warps for n in (42, 41, 40)] == [40, 40, 48]


def test_advice_names_what_stands_in_the_way():
    hopper = ARCHITECTURES[90]
    both = occupancy(hopper, registers=255, threads=128, shared_memory=113 * KIB)
    assert both.limiters == (Resource.REGISTERS, Resource.SHARED_MEMORY)
    assert both.advice == "registers 255 → 168, shared memory 115,712 → 76,800 B"
    only_registers = occupancy(hopper, registers=255, threads=128)
    assert only_registers.advice == "registers 255 → 168"


def test_impossible_figures_are_refused():
    for bad in ({"registers": 0}, {"threads": 0}, {"shared_memory": -1}, {"barriers": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            occupancy(A10G, **{"registers": 32, "threads": 128, **bad})
