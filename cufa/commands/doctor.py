"""`cufa doctor`."""

from __future__ import annotations

import dataclasses

import click
from rich.text import Text

from ..doctor import Status, examine
from .common import Exit, json_option, print_json, stdout

_STYLE = {Status.OK: "green", Status.ABSENT: "yellow", Status.PROBLEM: "bold red"}


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Check driver, CuPy, NVRTC, headers, GPU, caches and compilers, then make one call and check its result.

    Every problem comes with its fix. A machine without a GPU is not a problem: attention runs on its CPU.

    Exit codes: 0 no problem; 1 there are problems; 2 wrong usage.
    """
    checks = examine()
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        console = stdout()
        width = max(len(check.name) for check in checks)
        for check in checks:
            status = (f"{check.status:<7}", _STYLE[check.status])
            console.print(Text.assemble(f"{check.name:<{width}}  ", status, f"  {check.detail}"))
            if check.fix:
                console.print(Text(f"{'':<{width}}  fix      {check.fix}"))
    if any(check.status is Status.PROBLEM for check in checks):
        raise SystemExit(int(Exit.FAILED))
