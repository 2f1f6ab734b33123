"""Measured ceilings of the L2 cache and of shared memory, for a hierarchical roofline.

``python -m cufa.measure.memory_rates`` measures and records them; device memory's ceiling is among
:mod:`cufa.measure.limits`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..calls.tuning import write_json
from ..gpu.architectures import Device
from . import cards, limits, machine
from .measuring import time_of

FOLDER = "memory"
"""Folder of these files in the records."""
_ROUNDS, _ITERATIONS, _UNROLL = 256, 1 << 12, 4
"""Constants of cuda_src/limits/memory.cu. An H200 reads the same 8.7 MB in each round: a sixth of its L2 cache."""
_BLOCKS_PER_SM, _THREADS = 2, 512
_LANE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class MemoryRates:
    """Rates of reads in bytes per second, of all SMs together."""

    device: str
    recorded: str
    """Date and time, ISO 8601."""
    l2_bytes: float
    shared_bytes: float | None
    """None: not measured."""


def measure_rates(device: Device) -> MemoryRates:
    """Measure the rates of the current GPU; takes about a second."""
    import cupy

    blocks = _BLOCKS_PER_SM * device.num_sms
    sink = cupy.empty(blocks * _THREADS, np.float32)
    round_bytes = blocks * _THREADS * _UNROLL * _LANE_BYTES
    source = cupy.random.random(round_bytes // 8)
    shared_bytes = _THREADS * _LANE_BYTES

    def seconds(name: str, arguments: tuple[Any, ...], shared: int = 0) -> float:
        run = limits.launch_of("limits/memory.cu", name, {}, (blocks, _THREADS, shared), arguments)
        return time_of(run, on_gpu=True, seconds=0.5).p10

    from_l2 = seconds("l2_limit", (source, np.int32(_ROUNDS), sink))
    from_shared = seconds("shared_limit", (sink, np.int32(_ITERATIONS)), _UNROLL * shared_bytes)
    where = machine.environment(device)
    return MemoryRates(
        where["device"],
        where["recorded"],
        _ROUNDS * round_bytes / from_l2,
        blocks * shared_bytes * _ITERATIONS * _UNROLL / from_shared,
    )


def path_of(device: str) -> Path:
    return cards.path_of(device, cards.RECORDS_DIR / FOLDER).with_suffix(".json")


def load(device: str) -> MemoryRates | None:
    """The recorded rates of a GPU, by its name; None: not recorded. Raises ValueError for a damaged file."""
    file = path_of(device)
    if not file.is_file():
        return None
    try:
        return MemoryRates(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error


def record(found: MemoryRates) -> None:
    write_json(path_of(found.device), dataclasses.asdict(found))


if __name__ == "__main__":
    from ..run.cuda.backend import current_device

    rates = measure_rates(current_device())
    record(rates)
    print(rates)
