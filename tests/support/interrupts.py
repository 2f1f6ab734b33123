"""Ctrl-C at a chosen line."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable
from typing import Any


def was_interrupted(call: Callable[[], Any], at: int, files: str) -> bool:
    """Whether ``call`` ran as far as the ``at``-th line of sources whose paths contain ``files``, and was interrupted
    there."""
    lines, before = itertools.count(), sys.gettrace()

    def trace(frame, event, _):
        if files not in frame.f_code.co_filename:
            return None
        # Python handles signals after calls: a lock is never left between its `with` and its release.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with ") and next(lines) == at:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
