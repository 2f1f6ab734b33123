"""The user's cache folder: its path, and a check that no other user can put files into it."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def cache_dir() -> Path:
    """``$CUFA_CACHE_DIR``, or ``cufa`` in the user's cache folder, or for a user without a home folder ``cufa-UID`` in
    the temporary folder. Not created here."""
    named = os.environ.get("CUFA_CACHE_DIR")
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cufa"
    except RuntimeError:  # HOME is not set and the user has no entry in the password file
        return _without_home()


def runs_dir() -> Path:
    """The dashboard's runs: ``$CUFA_RUNS_DIR``, or ``cufa/runs`` in the user's data folder, or ``runs`` in the cache if
    there is no home folder. Not created here."""
    named = os.environ.get("CUFA_RUNS_DIR")
    if named:
        return Path(named)
    try:
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError:
        return cache_dir() / "runs"
    return data / "cufa" / "runs"


@functools.cache
def _without_home() -> Path:
    folder = Path(tempfile.gettempdir(), f"cufa-{_user() or 'cache'}")
    warnings.warn(
        f"this user has no home folder: cufa keeps its files in {folder}. CUFA_CACHE_DIR names another folder",
        RuntimeWarning,
        stacklevel=2,
    )
    return folder


def _user() -> int | None:
    """The user's number; None where files have no such owner (Windows)."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def own_folder(name: str) -> Path:
    """The folder of this name in the cache, for files that are executed: made if it is missing.

    Raises PermissionError where the cache folder, or the new folder, belongs to another user or can be written by
    others: a library that they left there would run as this user. Raises OSError where it cannot be made.
    """
    folder, user = cache_dir() / name, _user()
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    for path in (folder.parent, folder) if user is not None else ():
        found = path.stat()
        if found.st_uid != user:
            raise PermissionError(f"{path} belongs to user {found.st_uid}, and this process is user {user}")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"{path} can be written by other users: chmod go-w {path}")
    return folder


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file of :func:`own_folder`, made if it is missing; other processes wait. A link is not followed,
    and an existing file is not truncated. Without ``fcntl`` there is no lock. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(file, flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
