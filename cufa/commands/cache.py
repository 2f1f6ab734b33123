"""`cufa cache`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.text import Text

from ..cache import cache_dir, runs_dir
from .common import Exit, bytes_text, fail, json_option, print_json, stdout

#: Folders below the cache folder whose files can be made again: what they hold, and the endings of the files.
_MADE = {
    "kernels": ("kernels compiled ahead of time", (".cubin",)),
    "host": ("kernels compiled for the executor", (".so", ".lock")),
    "static": ("builds on the dashboard's pages", (".json",)),
    "listings": ("machine code on the dashboard's pages", (".json",)),
}


@click.command("cache")
@click.argument("action", type=click.Choice(["show", "clear"]), default="show")
@json_option
def cache_command(action: str, as_json: bool) -> None:
    """Show the folders that cufa writes to, with their sizes, or clear what can be made again.

    clear removes compiled kernels and listings from cufa's cache folder. It keeps tuned tiles, which took measuring,
    the dashboard's runs, and CuPy's folder, which other programs use too.

    Exit codes: 0 done; 2 wrong usage; 3 a file cannot be removed.
    """
    made = [file for name, (_, endings) in _MADE.items() for file in _files(cache_dir() / name, endings)]
    try:
        for file in made if action == "clear" else ():
            file.unlink()
    except OSError as error:
        fail(Exit.MISSING, str(error))
    rows = [
        (what, place, sum(x.stat().st_size for x in _files(place, ends))) for what, place, ends in places()
    ]
    if as_json:
        print_json([{"holds": what, "path": str(place), "bytes": size} for what, place, size in rows])
        return
    for what, place, size in rows:
        stdout().print(Text(f"{bytes_text(size):>9}  {place}  ({what})"), soft_wrap=True)


def places() -> list[tuple[str, Path, tuple[str, ...]]]:
    """(contents, folder, endings of the files that count); no endings: all files, also in folders below."""
    home, named = Path(os.path.expanduser("~")), os.environ.get
    cupy = Path(named("CUPY_CACHE_DIR") or home / ".cupy" / "kernel_cache")
    return [
        *((what, cache_dir() / name, endings) for name, (what, endings) in _MADE.items()),
        ("tuned tiles, CUFA_CACHE_DIR", cache_dir(), (".json",)),
        ("the dashboard's runs, CUFA_RUNS_DIR", runs_dir(), ()),
        ("kernels that CuPy compiled, of all programs, CUPY_CACHE_DIR", cupy, ()),
    ]


def _files(place: Path, endings: tuple[str, ...]) -> list[Path]:
    found = place.glob("*") if endings else place.rglob("*")
    return [x for x in found if x.is_file() and not x.is_symlink() and (not endings or x.suffix in endings)]
