"""The user's cache folder: where it is, and that nobody else can put files into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """``$CUFA_CACHE_DIR``, or ``cufa`` in the user's cache folder. Not created here."""
    named = os.environ.get("CUFA_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cufa"


def own_folder(name: str) -> Path:
    """The folder of this name in the cache, for files that are executed: made if it is missing.

    Raises PermissionError where the cache folder, or this one, belongs to another user or can be written by others: a
    library that they left there would run as this user. Raises OSError where it cannot be made.
    """
    folder = cache_dir() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder.parent, folder):
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(
                f"{path} belongs to user {found.st_uid}, and this process is user {os.geteuid()}"
            )
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"{path} can be written by other users: chmod go-w {path}")
    return folder


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file of :func:`own_folder`, made if it is missing; other processes wait. A link is not followed
    and nothing is cut off, whoever made the file. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
