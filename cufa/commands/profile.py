"""`cufa profile`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from ..kernels import KERNELS
from .common import Exit, fail, stderr
from .repro import program, rows_of_source

_SECTIONS = (
    "SpeedOfLight",
    "SourceCounters",
    "WarpStateStats",
    "MemoryWorkloadAnalysis_Tables",
    "LaunchStats",
)
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_MISSING = (
    "ncu was not found: install Nsight Compute (https://developer.nvidia.com/nsight-compute; it is in the CUDA "
    "toolkit, package cuda-nsight-compute-*), and put its folder on PATH"
)
_FORBIDDEN = (
    "the driver lets only administrators read counters (ERR_NVGPUCTRPERM): run the command as root, or set the module "
    "option NVreg_RestrictProfilingToAdminUsers=0; https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


@click.command("profile")
@click.argument("source")
@click.option("--row", type=click.IntRange(0), default=0, show_default=True, help="Row of SOURCE.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default="report", show_default=True)
def profile_command(source: str, row: int, output: Path) -> None:
    """Profile one launch of a measured row with NVIDIA's Nsight Compute: stalls by instruction, traffic and hit rates.

    SOURCE is as for `cufa repro`. Writes OUTPUT.ncu-rep, OUTPUT.csv (instructions) for the dashboard's page Machine
    code, and OUTPUT.raw.csv (counters) for its page Run.

    Exit codes: 0 done; 1 ncu failed; 2 wrong usage; 3 ncu is missing, or may not read counters.
    """
    ncu = shutil.which("ncu") or next((x for x in _PLACES if Path(x).is_file()), None)
    if ncu is None:
        fail(Exit.MISSING, _MISSING)
    try:
        found, environment = rows_of_source(source)
        measured = found[row]
        text = program([measured], environment)
        entry = KERNELS[measured.json["kernel"]].entry
    except IndexError:
        raise click.UsageError(f"--row {row}: {source} has rows 0 to {len(found) - 1}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise click.UsageError(f"{source}: {error}: name a row of a kernel of cufa") from error
    report = output.with_name(f"{output.name}.ncu-rep")
    sections = [x for name in _SECTIONS for x in ("--section", name)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "again.py")
        file.write_text(text, encoding="utf-8")
        launch = [sys.executable, str(file), "--once", measured.label]
        _run([ncu, *sections, "-k", f"regex:{entry}", "-c", "1", "-f", "-o", str(report), *launch])
    for ending, page in ((".csv", "source"), (".raw.csv", "raw")):
        printed = _run([ncu, "--import", str(report), "--page", page, "--csv"])
        output.with_name(f"{output.name}{ending}").write_text(printed, encoding="utf-8")
    stderr().print(f"{report}, {output}.csv, {output}.raw.csv", markup=False, soft_wrap=True)


def _run(command: list[str]) -> str:
    """Standard output. Exits if ncu fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        fail(Exit.MISSING, _FORBIDDEN)
    if done.returncode:
        fail(Exit.FAILED, f"ncu ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
