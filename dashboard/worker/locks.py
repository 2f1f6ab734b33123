"""Locks on files, which go with the process that holds them, whatever ends it."""

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
    """Take a lock; keep what is returned, the lock lives as long. None when another process has it.

    The lock goes with the process, whatever ends it. Raises OSError when the file cannot be made.
    """
    stream = open(file, "a+b")  # noqa: SIM115 - held on purpose
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        # A reader that looks (is_locked) holds it for an instant; the caller tries again.
        stream.close()
        return None
    return stream
