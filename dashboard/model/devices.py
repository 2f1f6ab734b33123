"""Where runs can go: the CPU and the GPUs that the driver shows, without making a context on any."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re

from cufa.dashboard.model import gpu as driver_of_gpus
from cufa.dashboard.worker.jobs import CPU
from cufa.gpu.architectures import Device, find_architecture
from cufa.measure import machine, peers

_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


@functools.cache
def cpu_name() -> str:
    return str(machine.environment(None)["device"])


def run_devices() -> dict[str, str]:
    """Devices by the name that a job uses ("cuda:0", "cpu") with their names in words; GPUs first."""
    found = {}
    for number in range(driver_of_gpus.gpu_count()):
        with contextlib.suppress(ValueError):  # too old for the kernels: the page Doctor says so
            found[f"cuda:{number}"] = f"GPU {number}: {gpu(number).name}"
    return found | {CPU: f"CPU: {cpu_name()}, {len(os.sched_getaffinity(0))} threads"}


@functools.cache
def gpu(number: int) -> Device:
    """Name, architecture and SMs as the driver gives them. Raises ValueError for a GPU older than sm_80."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), number)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), which, number)
        return value.value

    arch = find_architecture(10 * attribute(_MAJOR) + attribute(_MINOR))
    return Device(name.value.decode(), arch, attribute(_SM_COUNT))


def device_of(name: str) -> Device | None:
    """None for the CPU."""
    return None if name == CPU else gpu(int(name.partition(":")[2]))


def is_card(card: str, name: str) -> bool:
    """Whether what a driver calls a card, "NVIDIA H200 NVL", has this name in it, word by word: an H20 is no H200."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", card) is not None


def peers_here(device: str) -> tuple[str, ...]:
    """Other libraries that can be timed there."""
    if device == CPU or importlib.util.find_spec("cupy") is None:
        return ()
    return peers.here()
