"""`cufa dashboard`: what it starts, what it asks for."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from dashboard_support import APP


def test_the_command_starts_streamlit_on_this_very_cufa(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cufa.cli import main

    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append((command, env)))
    result = CliRunner().invoke(main, ["dashboard", "--no-browser", "--port", "8700"])
    assert result.exit_code == 0, result.output
    (command, environment), *_ = started
    assert command[1:5] == ["-m", "streamlit", "run", str(Path(APP).with_name("server.py"))]
    assert "--server.port=8700" in command
    assert not any("headless" in argument for argument in command)
    assert environment["CUFA_DASHBOARD_OPEN_BROWSER"] == "0"
    assert CliRunner().invoke(main, ["dashboard"]).exit_code == 0
    assert started[1][1]["CUFA_DASHBOARD_OPEN_BROWSER"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(APP).parents[1])


def test_a_port_that_is_taken_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cufa.cli import main

    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["dashboard", "--no-browser", "--port", port])
    assert result.exit_code == 2
    assert f"--port {port}: Address already in use" in result.output


def test_the_command_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cufa.cli import main

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else real(name))
    result = CliRunner().invoke(main, ["dashboard"])
    assert result.exit_code == 3
    assert "pip install 'cufa[dashboard]'" in result.output


def test_importing_cufa_loads_nothing_of_the_dashboard() -> None:
    code = "import sys, cufa, cufa.cli; print({'streamlit', 'plotly', 'cufa.dashboard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
