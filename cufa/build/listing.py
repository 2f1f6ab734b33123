"""PTX and SASS of a build, each instruction with its source lines. No GPU is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import sass
from .machine_code import Code
from .ptx import parse_ptx
from .static_compile import static_compile
from .variants import Variant


@dataclasses.dataclass(frozen=True)
class Listing:
    """One build. Its code is that which runs: asking for line numbers changes no instruction."""

    ptx: Mapping[str, Code]
    """By kernel entry, of those that the build launches."""
    sass: Mapping[str, Code]
    """Likewise; empty where there is no disassembler."""
    missing: str | None
    """Why there is no SASS, and what to install."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ptx": {name: code.as_json() for name, code in self.ptx.items()},
            "sass": {name: code.as_json() for name, code in self.sass.items()},
            "missing": self.missing,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Listing:
        """Raises KeyError, TypeError, IndexError or ValueError for what :meth:`as_json` did not write."""
        ptx, found = (
            {name: Code.from_json(code) for name, code in content[kind].items()} for kind in ("ptx", "sass")
        )
        return cls(ptx, found, content["missing"])


def listing(variant: Variant) -> Listing:
    """Compile a variant with line numbers and take it apart.

    Raises :class:`~cufa.build.static_compile.CompileError` where it does not compile, and
    :class:`~cufa.build.static_compile.MissingCompilerError` without NVRTC.
    """
    report = static_compile(variant.source, variant.constants, variant.arch, line_info=True)
    try:
        found, missing = sass.disassemble(report.cubin), None
    except sass.MissingDisassemblerError as error:
        found, missing = {}, str(error)
    launched = {
        launch.entry for launch in variant.launches
    }  # of what a file defines: some serve other problems
    ptx = parse_ptx(report.ptx)
    return Listing(
        {name: code for name, code in ptx.items() if name in launched},
        {name: code for name, code in found.items() if name in launched},
        missing,
    )
