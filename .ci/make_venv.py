"""Create a virtual environment with pip in it, on whatever Python there is.

Debian and Ubuntu split `ensurepip` off into the package python3-venv, so that `python3 -m venv` fails on a
machine that has only python3. Then the environment is made without pip, and pip is fetched from the package
index that everything else comes from, its SHA-256 checked against the index.

    python3 .ci/make_venv.py DIRECTORY
"""

import hashlib
import html
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import venv

OLDEST = (3, 11)


def main() -> None:
    if sys.version_info < OLDEST:
        sys.exit(
            f"cufa needs Python {OLDEST[0]}.{OLDEST[1]} or newer; {sys.executable} is older. "
            "Say which to use: make PYTHON=python3.12 ..."
        )
    target = pathlib.Path(sys.argv[1])
    try:
        import ensurepip

        has_ensurepip = bool(ensurepip.version())
    except (ImportError, AttributeError, OSError):
        has_ensurepip = False
    venv.EnvBuilder(with_pip=has_ensurepip, clear=target.exists(), symlinks=True).create(target)
    if not has_ensurepip:
        try:
            install_pip(target / "bin" / "python")
        except (urllib.error.URLError, LookupError) as error:
            package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            sys.exit(
                f"No ensurepip here, and pip could not be fetched ({error}).\nFix: apt-get install {package}"
            )


def install_pip(python: pathlib.Path) -> None:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    request = urllib.request.Request(index, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        page = answer.read().decode()
    links = re.findall(r'href="([^"]+/pip-([\d.]+)-py3-none-any\.whl)#sha256=([0-9a-f]{64})"', page)
    if not links:
        raise LookupError(f"no pip wheel at {index}")
    link, version, sha256 = max(links, key=lambda found: [int(part) for part in found[1].split(".")])
    with urllib.request.urlopen(urllib.parse.urljoin(index, html.unescape(link)), timeout=60) as answer:
        wheel = answer.read()
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise LookupError(f"pip {version} from {index} does not have the checksum that the index gives")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"pip-{version}-py3-none-any.whl"
        path.write_bytes(wheel)
        # A wheel is a zip file: pip runs from within its own.
        subprocess.run([python, path / "pip", "install", "--quiet", "--no-index", path], check=True)


if __name__ == "__main__":
    main()
