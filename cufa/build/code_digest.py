"""A digest of the machine code that one build gives: two builds with the same digest run the same instructions."""

from __future__ import annotations

import hashlib
import io
import re

from .static_compile import CompileReport

#: Sections with instructions and constants. Not .nv.constant0: it holds the parameters, so its size changes with
#: theirs although no instruction does.
_CODE = re.compile(r"\.text\.|\.nv\.constant[1-35-9]|\.rodata")


def code_digest(report: CompileReport) -> str:
    """Of instructions, constants, registers and shared memory; 16 hexadecimal digits. Raises ImportError without
    pyelftools."""
    from elftools.elf.elffile import ELFFile

    digest = hashlib.sha256()
    for section in ELFFile(io.BytesIO(report.cubin)).iter_sections():
        if _CODE.match(section.name):
            digest.update(section.name.encode() + section.data())
    registers = [(e.name, e.registers, e.static_shared_bytes) for e in report.entries]
    return hashlib.sha256(digest.digest() + repr(registers).encode()).hexdigest()[:16]
