"""mypy on cufa, with the dashboard where the wheel has it: `make typecheck`.

In a checkout ``dashboard`` lies beside the package, so mypy does not find ``cufa.dashboard`` there. It reads a folder
of links in which ``dashboard`` lies inside.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> int:
    folder = ROOT / "build" / "typecheck"
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "cufa"
    package.mkdir(parents=True)
    for path in (*(ROOT / "cufa").iterdir(), ROOT / "dashboard"):
        (package / path.name).symlink_to(path)
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    return subprocess.run([sys.executable, "-m", "mypy", *options, *sys.argv[1:]], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
