"""The commands that messages advise."""

from __future__ import annotations

from pathlib import Path


def install(extra: str) -> str:
    """The pip command for an extra: from the checkout that holds this file, or by name for an installed cufa."""
    root = Path(__file__).parents[2]
    return f"pip install '{root if (root / 'pyproject.toml').is_file() else 'cufa'}[{extra}]'"
