"""The machine that a measurement was taken on: device, clocks, driver, versions, commit."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from .. import __version__
from ..build.compiler import cupy_options
from ..gpu.architectures import Device

SOURCES = Path(__file__).parents[2]

Json = dict[str, Any]


def environment(device: Device | None) -> Json:
    """Device, clocks, driver, host, versions, commit, compiler flags, time."""
    found: Json = {
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _cpu_name() if device is None else device.name,
        "versions": _versions(),
    }
    commit = _commit()
    if commit:
        found["commit"] = commit
    if device is not None:
        import cupy

        runtime = cupy.cuda.runtime
        major, minor = cupy.cuda.nvrtc.getVersion()
        found |= {
            "arch": device.arch.name,
            "host": _cpu_name(),
            "num_sms": device.num_sms,
            "nvrtc": f"{major}.{minor}",
            "cuda_driver": runtime.driverGetVersion(),
            "flags": [o for o in cupy_options() if not o.startswith("-I")] + ["-std=c++17", "-ftz=true"],
            "gpu": gpu_state(),
        }
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cufa": __version__}
    for name in ("numpy", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    """Commit of the checkout that this file is in, with "-dirty" if files differ; "" outside a checkout."""
    if not (SOURCES / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def gpu_state() -> Json | None:
    """Driver and clocks as nvidia-smi reports them now; None without nvidia-smi."""
    fields = (
        "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
        "temperature.gpu",
    )  # fmt: skip
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, (value.strip() for value in answer.stdout.split(",")), strict=False))
