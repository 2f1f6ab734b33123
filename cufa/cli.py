"""The command line: a group whose commands are imported when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from . import __version__
from .streams import clear_failures, use_streams_that_exist

#: Help by command. The command NAME is ``NAME_command`` of cufa.commands.NAME.
_COMMANDS = {
    "demo": "FA1, FA2 and naive attention side by side on this machine.",
    "doctor": "Check driver, compiler, CuPy and GPU; say how to fix each problem.",
    "bench": "Time kernels over shapes, with errors against float64.",
    "compare": "Two algorithms in one run: measured and predicted ratio.",
    "tune": "Find the fastest tiles for a shape on this GPU and keep them.",
    "compile": "Build every kernel without a GPU: registers, spills, occupancy.",
    "emulate": "Execute a kernel's CUDA source on the CPU, and check it.",
    "inside": "See each warp of a kernel wait, multiply and store.",
    "parallel": "Attention over several GPUs: predicted, and measured on those of this machine.",
    "profile": "Stalls and traffic of a measured row, by Nsight Compute.",
    "repro": "Write a measurement as one Python file that repeats it.",
    "cache": "Show the folders that cufa writes to, or clear them.",
    "dashboard": "See the time, tile by tile and block by block, in a browser on this machine.",
}

_VARIABLES = [
    ("CUFA_CACHE_DIR", "Tuned tiles, kernels compiled ahead of time and for the executor.  [~/.cache/cufa]"),
    ("CUFA_RUNS_DIR", "The dashboard's runs.  [~/.local/share/cufa/runs]"),
    ("CUPY_CACHE_DIR", "Kernels that were compiled on first use.  [~/.cupy/kernel_cache]"),
    ("CUPY_TF32", "1: float32 on a GPU may be computed in TF32."),
    ("CXX", "C++ compiler of the executor (emulate).  [g++, clang++ or c++]"),
]


class _LazyGroup(click.Group):
    def main(self, *arguments: Any, **options: Any) -> Any:
        use_streams_that_exist()
        with clear_failures():
            return super().main(*arguments, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"cufa.commands.{cmd_name}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))
        with formatter.section("Environment variables"):
            formatter.write_dl(_VARIABLES)


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success; 1 a check failed or a result was wrong; 2 wrong usage; 3 a GPU, "
    "a package or memory is missing. Results go to stdout, progress to stderr; --json prints one document.",
)
@click.version_option(__version__, prog_name="cufa")
def main() -> None:
    """FlashAttention for NumPy and CuPy, in kernels written by hand."""
