"""The cache folder: libraries in it are executed, so only their user may put them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import cufa
from cufa import cache as module
from cufa.cache import cache_dir, locked, own_folder
from cufa.calls import tuning
from cufa.cli import main
from cufa.commands.cache import places
from cufa.commands.dashboard import make_importable
from cufa.problem.integers import Integers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_new_folder_is_closed_to_others(cache: Path) -> None:
    assert own_folder("host").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", [".", "host"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_is_refused(cache: Path, name: str, mode: int) -> None:
    own_folder("host")
    (cache / name).chmod(mode)
    with pytest.raises(PermissionError, match="can be written by other users: chmod go-w"):
        own_folder("host")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(cache: Path) -> None:
    os.chown(own_folder("host"), 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        own_folder("host")


def test_a_lock_follows_no_link_and_cuts_nothing(cache: Path) -> None:
    target = cache / "target"
    link, file = own_folder("host") / "a.lock", own_folder("host") / "b.lock"
    target.write_text("kept")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), locked(link):
        pass
    file.write_text("kept")
    with locked(file):
        assert target.read_text() == file.read_text() == "kept"


def test_a_user_without_a_home_has_a_folder_in_the_temporary_one(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    module._without_home.cache_clear()
    tuning.load.cache_clear()
    with pytest.warns(RuntimeWarning, match="no home folder: cufa keeps its files in .*CUFA_CACHE_DIR"):
        folder = cache_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one line is enough
        assert "fa3" in str(cufa.plan((1, 8, 1024, 64), device="sm_90"))
    assert own_folder("host").parent == folder == tmp_path / f"cufa-{os.geteuid() or 'cache'}"
    cache_dir().chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by other users"):
        own_folder("host")
    module._without_home.cache_clear()


def test_cufa_where_posix_is_not():
    """Without what Windows and macOS lack: calls on the CPU, plans, and what the command line says."""
    code = """
import os, sys
sys.modules["fcntl"] = None
for name in ("sched_getaffinity", "geteuid", "O_NOFOLLOW", "O_CLOEXEC", "register_at_fork", "fork", "killpg"):
    if hasattr(os, name):
        delattr(os, name)
import numpy as np, cufa
from cufa.cache import locked, own_folder
from cufa.run.cpu.blas import usable_cores
x = np.ones((1, 8, 300, 64), np.float32)
out, lse = cufa.flash_attention(x, x, x, causal=True, return_lse=True)
cufa.flash_attention_backward(x, x, x, x, out, lse, causal=True)
print(cufa.plan(x, causal=True))
with locked(own_folder("host") / "a.lock"):
    assert usable_cores() >= 1
from click.testing import CliRunner
from cufa.cli import main
for command, code, text in (["cache"], 0, "tuned"), (["doctor"], 0, "first gradients"), (["dashboard"], 3, "fcntl"):
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, text in done.output) == (code, True), done.output
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_numbers_of_a_mask_unpack_to_their_shape_and_no_further() -> None:
    """A text of 1.4 MB once became 2 GB."""
    record = Integers(np.zeros(1000, np.int32)).as_json()
    with pytest.raises(ValueError, match="not 40"):
        Integers.from_json({**record, "shape": [10]})
    with pytest.raises(ValueError, match="at most 32,768"):
        Integers.from_json({"shape": [2**30], "packed": "A" * 1_400_000})


def test_clearing_removes_only_what_can_be_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(cache / "runs"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache.parent / "cupy"))
    kept = ["tuned-card.json", "runs/one/result.json", "../cupy/a.cubin", "kernels/notes.txt", "traces/a.npz"]
    made = ["kernels/a.cubin", "host/a.so", "host/a.so.lock", "static/a.json", "listings/a.json"]
    for name in (*kept, *made):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"123")
    shown = json.loads(CliRunner().invoke(main, ["cache", "--json"]).stdout)
    assert [x["bytes"] for x in shown] == [3, 6, 3, 3, 3, 3, 3]
    cleared = json.loads(CliRunner().invoke(main, ["cache", "clear", "--json"]).stdout)
    assert [x["bytes"] for x in cleared] == [0, 0, 0, 0, 3, 3, 3]
    assert all((cache / name).exists() for name in kept) and not any((cache / name).exists() for name in made)


@pytest.mark.parametrize("variables", [{}, {"XDG_DATA_HOME": "/data"}, {"CUFA_RUNS_DIR": "/runs"}])
def test_runs_are_shown_where_the_dashboard_keeps_them(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_importable()
    from cufa.cache import runs_dir

    for name in ("XDG_DATA_HOME", "CUFA_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runs_dir() in [place for _, place, _ in places()]
