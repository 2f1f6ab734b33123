"""Output of commands when a terminal lacks letters, a disk is full or memory runs out: a message in place of a
traceback."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

#: Letters of tables, block maps and units, and their replacements in encodings that lack them.
_PLAIN = {
    "×": "x", "–": "-", "—": "-", "…": "...", "→": "->", "µ": "u", "²": "2", "≤": "<=", "≥": ">=", "±": "+-",
    "█": "#", "▒": "+", "░": ":", "·": ".",
}  # fmt: skip


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in letters), error.end


codecs.register_error("cufa.plain", _plain)


def use_streams_that_exist() -> None:
    """Discard output if stdout or stderr is None or closed (``cufa … >&-``, programs without a console). Write plain
    letters if the encoding has no others (ASCII, Latin-1)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process
        elif hasattr(stream, "reconfigure") and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="cufa.plain")


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Turn a full disk behind stdout, or a lack of memory, into a message and an exit code."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        _give_up("MISSING", f"not enough memory{reason}. Fix: a smaller problem, e.g. a shorter --seqlen")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        _give_up("FAILED", f"the output cannot be written: {error}")


def _drop_output() -> None:
    """Discard the rest of the output, which would fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _give_up(exit_name: str, message: str) -> NoReturn:
    from .commands.common import Exit, fail

    fail(Exit[exit_name], message)
