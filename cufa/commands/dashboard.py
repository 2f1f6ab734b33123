"""`cufa dashboard`: start the Streamlit application in ``dashboard/``, which ships as ``cufa/dashboard``."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

import click

import cufa

from ..problem.checks import install
from .common import Exit, fail

_PACKAGE = Path(cufa.__file__).resolve().parent

OPEN_BROWSER = "CUFA_DASHBOARD_OPEN_BROWSER"
"""1: the server opens a browser once it listens. (Streamlit would, but only without its headless mode, and
then lays an advertisement over the page of whoever has a coding agent installed.)"""


def dashboard_dir() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "dashboard"
    return installed if installed.is_dir() else _PACKAGE.parent / "dashboard"


def make_importable() -> None:
    """Let ``import cufa.dashboard`` find it in a checkout too, where it lies beside the package."""
    parent = str(dashboard_dir().parent)
    if parent not in cufa.__path__:
        cufa.__path__.append(parent)


def launch_command(port: int | None) -> list[str]:
    """The command of the server. Address, telemetry and host check are set by the configuration beside the script."""
    # Outside site-packages, Streamlit assumes its own development checkout and refuses a port.
    command = [sys.executable, "-m", "streamlit", "run", str(dashboard_dir() / "server.py")]
    command.append("--global.developmentMode=false")
    return command if port is None else [*command, f"--server.port={port}"]


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise click.UsageError(
                f"--port {port}: {error.strerror}; name another, or none for the next free one from 8501"
            ) from error


@click.command("dashboard")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port on 127.0.0.1; 0: any free one (default: 8501, or the next free one).",
)
@click.option("--browser/--no-browser", default=True, help="Open the page in a browser.")
def dashboard_command(port: int | None, browser: bool) -> None:
    """See where the time goes: tiles, timelines, occupancy, rooflines. Local address only.

    Needs the extra dashboard.
    """
    if importlib.util.find_spec("fcntl") is None:
        fail(
            Exit.MISSING,
            "the dashboard needs fcntl's file locks, which Windows lacks. Fix: Linux, WSL included",
        )
    missing = [name for name in ("streamlit", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        fail(Exit.MISSING, f"{' and '.join(missing)} not installed. Fix: {install('dashboard')}")
    if port:
        _check_free(port)
    command = launch_command(port)
    # The child must import this very cufa, installed or not.
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), OPEN_BROWSER: str(int(browser))}
    # This process becomes the server: stopping `cufa dashboard` stops the server.
    os.execve(sys.executable, command, environment)
