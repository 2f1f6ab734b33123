"""The kernels' sources with something changed, as tests plant bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cufa.build import compiler


def with_changed(folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """The sources with one file changed or added. They are made in ``folder`` of links to all others, or have what was
    changed there before: a copy of a hundred files would take as long as many a kernel runs."""
    copy = folder / "cuda_src"
    if not copy.exists():
        _link(compiler.SOURCE_DIR, copy)
    path = copy / file
    for parent in reversed(
        path.relative_to(copy).parents[:-1]
    ):  # outermost first: no file is written through a link
        if (copy / parent).is_symlink():
            real = (copy / parent).resolve()
            (copy / parent).unlink()
            _link(real, copy / parent)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    changed = change(text)
    assert changed != text, f"the change does not apply to {file} any more"
    path.unlink(missing_ok=True)  # where it is a link, not what it leads to
    path.write_text(changed, encoding="utf-8")
    return copy


def _link(folder: Path, copy: Path) -> None:
    copy.mkdir()
    for entry in folder.iterdir():
        (copy / entry.name).symlink_to(entry)
