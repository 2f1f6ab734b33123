"""Commands when a terminal lacks letters, a disk is full or memory runs out: words and an exit code, no traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from sampling import of_today

import cufa
from cufa.cli import main


def cufa_command(*arguments: str, stdout=subprocess.PIPE, **options) -> subprocess.CompletedProcess[bytes]:
    # Empty: output is buffered, as for most users, and Python tries to write what is left once more when it exits.
    own = {"PYTHONPATH": str(Path(cufa.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    environment = {**os.environ, **own, **options.pop("env", {})}
    command = [sys.executable, "-m", "cufa", *arguments]
    return subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, check=False, **options
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["emulate", "--recorded"], ["emulate", "--recorded", "--json"]]
)
def test_a_full_disk_behind_stdout(arguments):
    with open("/dev/full", "wb") as full:
        done = cufa_command(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.decode().strip() == "the output cannot be written: [Errno 28] No space left on device"


@pytest.mark.in_turn
@pytest.mark.parametrize("encoding", of_today(["ascii", "latin-1"], "encoding of a demo", fixed=0))
@pytest.mark.slow
def test_an_encoding_without_the_letters(encoding):
    """The tables are there, and what stands for a letter is a letter like it."""
    arguments = ("demo", "--device", "cpu", "--seqlen", "600", "--seconds", "0.01")
    done = cufa_command(*arguments, env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding)
    cross = "x" if encoding == "ascii" else "×"
    assert f"queries {cross} 512 keys a cell" in text
    assert "::++" in text and "++ masked" in text and "?" not in text


@pytest.mark.in_turn
@pytest.mark.sampled(fixed=0, dated=1)
@pytest.mark.parametrize("stream", ["None", "open(os.devnull, 'w')"])
@pytest.mark.slow
def test_no_stdout(stream):
    """As in a program without a console, or closed by whoever called: a command runs and writes nothing."""
    code = f"""
import os, sys
from cufa.cli import main
for arguments, exit_code in (
    ("--help", 0), ("doctor", None), ("emulate --recorded", 0), ("emulate --recorded --json", 0),
    ("inside --recorded list", 0), ("demo --device cpu --seqlen 64 --seconds 0.01", 0),
    ("bench --device cpu --seqlen 64 --seconds 0.01", 0),
    ("compare fa2 fa1 --device cpu --seqlen 64 --seconds 0.01", 0), ("compile --help", 0), ("dashboard --help", 0),
    ("tune --device cpu --seqlen 64 --seconds 0.01", None),
):
    sys.stdout = {stream}
    if sys.stdout is not None:
        sys.stdout.close()
    try:
        main(arguments.split())
    except SystemExit as ended:
        assert exit_code in (None, ended.code or 0), (arguments, ended.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_wrong_usage_is_said_in_letters_that_exist():
    done = cufa_command("emulate", "--schedule", "²", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert b"'ascending', 'descending' or a number (a seed)" in done.stderr


@pytest.mark.in_turn
def test_a_problem_larger_than_memory():
    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    arguments = ("demo", "--device", "cpu", "--seqlen", "100000000")
    done = cufa_command(*arguments, preexec_fn=little_memory)
    assert done.returncode == 3
    message = " ".join(done.stderr.decode().split())
    assert "Traceback" not in message
    assert "not enough memory: Unable to allocate" in message
    assert message.endswith("Fix: a smaller problem, e.g. a shorter --seqlen")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "1e20"])
@pytest.mark.parametrize("command", [["demo"], ["bench"], ["compare", "fa1", "fa2"]])
def test_seconds_are_finite(command, seconds):
    result = CliRunner().invoke(main, [*command, "--seconds", seconds], catch_exceptions=False)
    assert result.exit_code == 2
    assert "--seconds" in result.stderr
