"""The cache folder: libraries in it are executed, so only their user may put them there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cufa.cache import locked, own_folder
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


def test_numbers_of_a_mask_unpack_to_their_shape_and_no_further() -> None:
    """A text of 1.4 MB once became 2 GB."""
    record = Integers(np.zeros(1000, np.int32)).as_json()
    with pytest.raises(ValueError, match="not 40"):
        Integers.from_json({**record, "shape": [10]})
    with pytest.raises(ValueError, match="at most 32,768"):
        Integers.from_json({"shape": [2**30], "packed": "A" * 1_400_000})
