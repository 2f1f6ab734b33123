"""What device code may use: the oldest NVRTC that cufa serves (12.9, 13.0) lacks some builtins of newer ones."""

from __future__ import annotations

import re

from cufa.build import compiler


def test_no_builtin_of_one_compiler():
    for path in sorted(compiler.SOURCE_DIR.rglob("*.cu*")):
        code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        assert "__builtin_" not in code, f"{path}: NVRTC 13.0 refuses __builtin_offsetof; use OFFSET_OF"
