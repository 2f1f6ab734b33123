"""From a plan's constants to the translation unit and options that NVRTC gets, through CuPy or without a GPU
(:mod:`cufa.build.static_compile`)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..cache import cache_dir, own_folder
from ..kernels.params import SOURCE_DIR as SOURCE_DIR
from ..plan.planner import Plan
from .score_text import score_text

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)

_INSIDE_HEADER = "shared/phases.cuh"
#: The header that an inside trace includes before the kernel.
_LOG_HEADER = "shared/phase_log.cuh"
_BRACKETS = functools.reduce(lambda deeper, _: rf"\((?:[^()]|{deeper})*\)", range(6), r"\([^()]*\)")

#: Text that only inside traces compile: the header's line, and INSIDE(...) with nested brackets.
STAMPS = re.compile(rf'#include "{_INSIDE_HEADER}"|\bINSIDE{_BRACKETS}')

#: This constant is a macro, defined in inside traces only: in other builds stamps vanish from the text.
INSIDE = "TRACE_INSIDE"


_LOG = logging.getLogger("cufa")
_LOAD_SECONDS = 0.3

_CLOCK_NS = 2_000_000_000
"""A file system may round the time of a change by this much."""


def included_files(source: str, stamps: bool = False) -> list[Path]:
    """The file and everything it includes, transitively, in a stable order. Paths are relative to
    ``cuda_src``; host twins (``host/``) are left out, as no GPU runs them, and the stamps of
    inside traces unless asked for."""
    return [SOURCE_DIR / name for name in _sources(source, stamps=stamps)]


def _sources(*sources: str, stamps: bool = False) -> dict[str, str]:
    """The text of these files and of all that they include, by name."""
    seen: dict[str, str] = {}
    pending, root = list(sources), str(SOURCE_DIR)
    while pending:
        name = pending.pop()
        if name in seen or name.startswith("host/") or (name == _INSIDE_HEADER and not stamps):
            continue
        seen[name] = text = _text(os.path.join(root, name))
        pending += [*_included(text), *([_LOG_HEADER] if name == _INSIDE_HEADER else [])]
    return {name: seen[name] for name in sorted(seen)}


def _text(path: str) -> str:
    """The text of a file. Read again only if its time has changed, or is so recent that a change may not show."""
    found = os.stat(path)
    if time.time_ns() - found.st_mtime_ns < _CLOCK_NS:
        return Path(path).read_text(encoding="utf-8")
    return _cached_text(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(256)  # a page or a record asks for the same files hundreds of times
def _cached_text(path: str, changed_ns: int, size: int) -> str:
    return Path(path).read_text(encoding="utf-8")


@functools.lru_cache(256)
def _included(text: str) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(text))


def source_digest(*sources: str) -> str:
    """Digest of a kernel's sources without comments, white space and the stamps of inside traces: changes when the
    code that is measured does."""
    digest = hashlib.sha256()
    for text in _sources(*sources).values():
        digest.update(_bare(text))
    return digest.hexdigest()


@functools.lru_cache(256)
def _bare(text: str) -> bytes:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return "".join(STAMPS.sub("", text).split()).encode()


def keeps_logs(source: str) -> bool:
    """Whether a kernel has stamps that an inside trace could write."""
    return SOURCE_DIR / _INSIDE_HEADER in included_files(source, stamps=True)


def trace_constants(trace: bool, inside: bool = False) -> dict[str, int | bool]:
    """Choices of a build that writes a trace record per work item; ``inside``: also stamps of each warp's phases."""
    return {"TRACE": trace or inside, **({INSIDE: True} if inside else {})}


def translation_unit(source: str, constants: Mapping[str, int | bool], score: str = "") -> str:
    """The text given to NVRTC: the choices of a build, a score function (:func:`~cufa.build.score_text.score_text`),
    then an include of the kernel, so that diagnostics keep the kernel's own file and line.

    The choices are the kernel's ``config.cuh`` with the values of this build; a kernel without that file (a probe) gets
    one ``constexpr`` line for each constant. Raises KeyError for a choice that ``constants`` has no value for.
    """
    lines = [f"// headers {_raw_digest(source)}"]  # CuPy's cache key does not see included files
    if constants.get(INSIDE):
        lines.append(f"#define {INSIDE} 1")
    config = config_file(source)
    if config is None:
        lines += [_declaration(name, value) for name, value in constants.items() if name != INSIDE]
    else:
        lines += [f'#line 1 "{config}"', configured(_text(str(SOURCE_DIR / config)), constants)]
        lines.append('#line 1 "cufa.cu"')
    if constants.get(INSIDE):
        lines.append(f'#include "{_LOG_HEADER}"')
    lines += [score] if score else []
    lines.append(f'#include "{source}"')
    return "\n".join(lines) + "\n"


def unit_of(plan: Plan, trace: bool = False, inside: bool = False) -> str:
    """The translation unit of a plan's kernel."""
    constants = {**plan.constants, **trace_constants(trace, inside)}
    score = score_text(plan.problem, plan.spec.folds_score_scale)
    return translation_unit(plan.spec.source_of(plan.config), constants, score)


_CHOICE = re.compile(r"^constexpr (int|bool) (\w+) = (-?\d+|true|false);", re.MULTILINE)


def config_file(source: str) -> str | None:
    """The config.cuh in a kernel's folder, which declares its compile-time choices; relative to ``cuda_src``."""
    name = os.path.join(os.path.dirname(source), "config.cuh")
    return name if (SOURCE_DIR / name).is_file() else None


def choices(config: str) -> dict[str, str]:
    """The choices that a ``config.cuh`` declares, with the values of its example build. In that file, a ``constexpr``
    whose value is a literal is a choice; all others follow from choices."""
    return {name: value for _, name, value in _CHOICE.findall(_text(str(SOURCE_DIR / config)))}


def configured(text: str, constants: Mapping[str, int | bool]) -> str:
    """The text of a ``config.cuh`` with the values of ``constants``. Raises KeyError for a choice without a value."""

    def with_value(choice: re.Match[str]) -> str:
        return f"constexpr {choice[1]} {choice[2]} = {_value(constants[choice[2]])};"

    return _CHOICE.sub(with_value, text)


def _declaration(name: str, value: int | bool) -> str:
    # A probe need not read every constant: NVRTC would warn of an unused one.
    kind = "bool" if isinstance(value, bool) else "int"
    return f"[[maybe_unused]] constexpr {kind} {name} = {_value(value)};"


def _value(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(int(value))


def _raw_digest(source: str) -> str:
    digest = hashlib.sha256()
    for text in _sources(source, stamps=True).values():
        digest.update(text.encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def announced(name: str, arch: str) -> Iterator[None]:
    """Around a compile: logs that NVRTC is at work, unless the code comes from CuPy's cache folder, which takes less
    than :data:`_LOAD_SECONDS`. CuPy does not say beforehand which of the two it will do."""
    line = threading.Timer(_LOAD_SECONDS, _LOG.info, ("compiling %s for %s (once, about 2 s)", name, arch))
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


def nvrtc_options(nvrtc_arch: str, sources: Path | None = None) -> tuple[str, ...]:
    """The options that CuPy passes, so that a static compile gives the same code, and cufa's include folder."""
    return (
        f"-I{sources or SOURCE_DIR}",
        "-std=c++17",
        f"-arch={nvrtc_arch}",
        "-ftz=true",
        "--device-as-default-execution-space",
    )


def cupy_options(min_capability: int = 80) -> tuple[str, ...]:
    """Options for ``cupy.RawModule``, which adds the architecture, the C++ standard and -ftz itself.

    Kernels made of Hopper's own instructions name their architecture: NVRTC 12.9 and later takes the first of
    two -arch options, and CuPy would ask for plain sm_90.
    """
    return (f"-I{SOURCE_DIR}", *(("-arch=sm_90a",) if min_capability == 90 else ()))


FOLDER = "kernels"
"""Folder of the user's cache for the cubin files of :func:`cufa.build.ahead.compile`."""


def cubin_name(name: str, unit: str, nvrtc_arch: str) -> str:
    """The file of a translation unit, named after a digest of all that NVRTC is given: a changed kernel is compiled
    anew. The folder of the headers is left out: the unit has a digest of their text."""
    options = nvrtc_options(nvrtc_arch, Path("cuda_src"))
    digest = hashlib.sha256("\0".join((unit, *options)).encode()).hexdigest()[:24]
    return f"{name}-{nvrtc_arch}-{digest}.cubin"


def find_compiled(name: str, unit: str, nvrtc_arch: str) -> Path | None:
    """The file that :func:`cufa.build.ahead.compile` left in the cache for a translation unit; None if there is none,
    or if others may have put it there."""
    file = cache_dir() / FOLDER / cubin_name(name, unit, nvrtc_arch)
    try:
        return own_folder(FOLDER) / file.name if file.is_file() else None
    except OSError as error:
        _LOG.warning("%s is not used: %s", file, error)
        return None
