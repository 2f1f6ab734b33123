"""The command line: a group whose commands are imported when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from . import __version__
from .streams import clear_failures, use_letters_that_exist

#: Command → (module under cufa.commands, attribute, short help).
_COMMANDS = {
    "demo": ("demo", "demo_command", "FA1, FA2 and naive attention side by side on this machine."),
    "doctor": (
        "doctor",
        "doctor_command",
        "Check driver, compiler, CuPy and GPU; say how to fix what is wrong.",
    ),
    "bench": ("bench", "bench_command", "Time kernels over shapes, with errors against float64."),
    "compare": ("compare", "compare_command", "Two algorithms in one run: measured and predicted ratio."),
    "tune": ("tune", "tune_command", "Find the fastest tiles for a shape on this GPU and keep them."),
    "compile": (
        "compile",
        "compile_command",
        "Build every kernel without a GPU: registers, spills, occupancy.",
    ),
    "emulate": ("emulate", "emulate_command", "Execute a kernel's CUDA source on the CPU, and check it."),
    "inside": (
        "inside",
        "inside_command",
        "See what each warp of a kernel waits for, multiplies and stores.",
    ),
    "dashboard": ("dashboard", "dashboard_command", "See where the time goes, in a browser on this machine."),
}


class _LazyGroup(click.Group):
    def main(self, *arguments: Any, **options: Any) -> Any:
        use_letters_that_exist()
        with clear_failures():
            return super().main(*arguments, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"cufa.commands.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success; 1 a check failed or a result was wrong; 2 wrong usage; 3 it needs a GPU, "
    "a package or memory that is not here. Results go to stdout, progress to stderr; --json prints one document.",
)
@click.version_option(__version__, prog_name="cufa")
def main() -> None:
    """FlashAttention for NumPy and CuPy, in kernels written by hand."""
