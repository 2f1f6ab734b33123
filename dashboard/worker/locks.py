"""File locks, which end with their process."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any


def is_locked(file: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        with open(file, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def hold(file: Path, *, wait: bool) -> Any:
    """Take a lock, which lasts as long as the returned object or its process; None if another process has the lock.

    Raises OSError if the file cannot be created.
    """
    stream = open(file, "a+b")  # noqa: SIM115 - held on purpose
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        # is_locked() holds the lock for an instant; the caller tries again.
        stream.close()
        return None
    return stream
