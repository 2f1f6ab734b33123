"""The CPU and the GPUs of this machine, from the driver: without CuPy, and without a context on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re

from cufa.dashboard.worker.jobs import CPU
from cufa.gpu.architectures import Device, find_architecture
from cufa.gpu.driver import driver
from cufa.measure import machine, peers
from cufa.run.cpu.blas import usable_cores

_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


@functools.cache
def cpu_name() -> str:
    return str(machine.environment(None)["device"])


@functools.cache
def gpu_count() -> int:
    """GPUs that the driver shows; 0 without a driver."""
    try:
        library = driver()
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return 0 if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)) else count.value


def run_devices() -> dict[str, str]:
    """Names in words by the names in jobs ("cuda:0", "cpu"); GPUs first."""
    names = {}
    for number in range(gpu_count()):
        with contextlib.suppress(ValueError):  # older than sm_80: the page Doctor says so
            names[f"cuda:{number}"] = f"GPU {number}: {gpu(number).name}"
    return names | {CPU: f"CPU: {cpu_name()}, {usable_cores()} threads"}


@functools.cache
def gpu(number: int) -> Device:
    """Name, architecture and SMs as the driver gives them. Raises ValueError for a GPU older than sm_80."""
    library = driver()
    library.cuInit(0)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), number)

    def attribute(code: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), code, number)
        return value.value

    arch = find_architecture(10 * attribute(_MAJOR) + attribute(_MINOR))
    return Device(name.value.decode(), arch, attribute(_SM_COUNT))


def device_of(name: str) -> Device | None:
    """None for the CPU."""
    return None if name == CPU else gpu(int(name.partition(":")[2]))


def is_card(card: str, name: str) -> bool:
    """Whether a driver's name of a card ("NVIDIA H200 NVL") contains ``name`` as whole words: "H20" does not."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", card) is not None


def is_same_card(one: str, other: str) -> bool:
    """:func:`is_card` in either direction."""
    return is_card(one, other) or is_card(other, one)


def peers_here(device: str) -> tuple[str, ...]:
    """Other libraries that can be timed on a device."""
    if device == CPU or importlib.util.find_spec("cupy") is None:
        return ()
    return peers.here()
