"""Where the kernels' sources are."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

#: Inside the wheel, or beside the package in a checkout.
SOURCE_DIR = _PACKAGE / "cuda_src" if (_PACKAGE / "cuda_src").is_dir() else _PACKAGE.parent / "cuda_src"
