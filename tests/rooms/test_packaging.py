"""The wheel holds what an installed cufa needs, and importing cufa touches no GPU library."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import cufa
from cufa.build.compiler import SOURCE_DIR, included_files
from cufa.kernels import KERNELS
from cufa.problem import checks

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


MOST_BYTES = 2_005_000


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    pytest.importorskip("build", reason="needs the build package (extra dev)")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def test_wheel_is_small(wheel_file):
    size = wheel_file.stat().st_size
    assert size <= MOST_BYTES, f"{size:,} bytes: `zipinfo -l` shows which files are large"


def test_twine_accepts_the_wheel(wheel_file):
    pytest.importorskip("twine", reason="needs twine (extra dev)")
    command = [sys.executable, "-m", "twine", "check", "--strict", wheel_file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_every_kernel_source(wheel):
    names = set(wheel.namelist())
    for spec in KERNELS.values():
        for path in (x for source in spec.sources for x in included_files(source)):
            assert f"cufa/cuda_src/{path.relative_to(SOURCE_DIR)}" in names
    sources = {p for p in SOURCE_DIR.rglob("*.*") if p.is_file() and p.suffix != ".md"}
    assert {f"cufa/cuda_src/{p.relative_to(SOURCE_DIR)}" for p in sources} <= names, (
        "the host runtime ships too"
    )


def test_wheel_holds_types_license_records_and_the_text_to_train_on(wheel):
    names = set(wheel.namelist())
    assert "cufa/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "cufa/train/alice.txt" in names
    for record in (ROOT / "cufa" / "records").glob("*.jsonl"):
        assert f"cufa/records/{record.name}" in names


def test_wheel_holds_nothing_else(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"cufa", f"cufa-{cufa.__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if "__pycache__" in name or "/tests/" in name]
    pages = {name for name in wheel.namelist() if name.endswith(".md")}
    assert pages and all(name.startswith("cufa/dashboard/") for name in pages), (
        "others are pages of a checkout"
    )


def test_metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert f"Version: {cufa.__version__}" in metadata
    assert "License-Expression: MIT" in metadata
    for extra in ("cuda13", "cuda12", "dashboard", "train", "train-cuda13", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "cufa = cufa.cli:main" in wheel.read(name).decode()
    assert "cufa.SelfAttention.v1 = cufa.train:SelfAttention" in wheel.read(name).decode()


def test_dependencies_are_few_and_have_both_ends_of_their_range():
    extras = PROJECT["optional-dependencies"]
    name_of = {
        x: re.split(r"[\[<>=;]", x)[0].strip()
        for x in itertools.chain(PROJECT["dependencies"], *extras.values())
    }
    assert {name_of[x] for x in PROJECT["dependencies"]} == {
        "numpy",
        "ml_dtypes",
        "threadpoolctl",
        "click",
        "rich",
    }
    for dependency, name in name_of.items():
        assert name in ("cufa", "hatchling") or (">=" in dependency and "<" in dependency), dependency
    for toolkit in (x for extra in ("cuda13", "cuda12") for x in extras[extra]):
        assert "[" not in toolkit and not toolkit.startswith("cuda-toolkit"), "no whole toolkit"


#: Distributions by the module that they are imported as, where the names differ.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "cuda": "cuda-bindings",
    "cupyx": "cupy",
    "elftools": "pyelftools",
    "nccl": "nccl4py",
    "pynvml": "nvidia-ml-py",
    "xdist": "pytest-xdist",
}
#: Peers and frameworks that cufa measures or serves and never asks for, and what they bring; NVIDIA's ncu_report.
_GUESTS = {"torch", "jax", "flash_attn", "triton", "cutlass", "ncu_report"}


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (["cufa"], ["cuda13", "multi", "train", "dashboard", "dev"]),
        (["dashboard"], ["dashboard", "cuda13"]),
        (["tests", "Makefile"], [*PROJECT["optional-dependencies"]]),
    ],
)
def test_what_is_imported_is_declared(folders, extras):
    declared = [
        *PROJECT["dependencies"],
        *(x for name in extras for x in PROJECT["optional-dependencies"][name]),
    ]
    names = {re.split(r"[\[<>=]", x)[0] for x in declared}
    names |= {"cupy"} if "cupy-cuda13x" in names else set()
    own = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"cufa", "dashboard", "evidence", "tests"}
    missing = {}
    for file in (x for folder in folders for x in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            for module in (x.split(".")[0] for x in modules):
                if _DISTRIBUTIONS.get(module, module) not in names | own | _GUESTS | set(
                    sys.stdlib_module_names
                ):
                    missing[module] = str(file.relative_to(ROOT))
    assert not missing, "imported and not declared in pyproject.toml"


def test_classifiers_are_the_versions_that_are_served():
    wanted = {f"Programming Language :: Python :: 3.{n}" for n in range(11, 15)}
    assert wanted <= set(PROJECT["classifiers"]) and PROJECT["requires-python"] == ">=3.11"


def test_import_loads_numpy_and_little_else(tmp_path):
    """Also where other libraries are installed: a package of each name lies on the path."""
    others = (
        "cupy", "cupy_backends", "cuda", "torch", "jax", "streamlit", "plotly", "pandas", "scipy", "numba",
    )  # fmt: skip
    others += ("click", "rich", "thinc", "pynvml", "PIL", "websockets")
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import numpy, ml_dtypes; before = set(sys.modules); "
    code += "import cufa; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not {name.split(".")[0] for name in loaded} & set(others)
    own = [name for name in loaded if name.split(".")[0] == "cufa"]
    assert not [name for name in own if name.startswith(("cufa.run.emulate", "cufa.dashboard"))]
    assert len(own) <= 105 and len(loaded) - len(own) <= 60


def test_a_folder_named_cupy_is_no_cupy(tmp_path):
    """CuPy's own checkout where Python runs: importable, and empty."""
    (tmp_path / "cupy").mkdir()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cupy, numpy, cufa; "
    code += "x = numpy.ones((1, 2, 8, 64), 'f'); "
    code += "print(cufa.flash_attention(x, x, x).sum(), cufa.flash_decode(x[:, :, :1], x, x).sum())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1024.0", "128.0"]


def test_command_line_starts_without_importing_commands():
    code = """
import sys
from click.testing import CliRunner
from cufa.cli import main
others = ("cufa.commands", "cufa.dashboard", "streamlit", "plotly")
print(CliRunner().invoke(main, ["--help"]).exit_code, *(n for n in sys.modules if n.startswith(others)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


def test_advice_to_install_an_extra_names_where_cufa_came_from(tmp_path, monkeypatch):
    assert checks.install("train") == f"pip install '{ROOT}[train]'"
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "cufa" / "problem" / "checks.py"))
    found = SimpleNamespace(read_text=lambda _: '{"dir_info": {}, "url": "file:///a/clone"}')
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: found)
    assert checks.install("train") == "pip install 'cufa[train] @ file:///a/clone'"
    found.read_text = lambda _: None  # from the package index
    assert checks.install("train") == "pip install 'cufa[train]'"


def test_dev_install_reads_the_checkout():
    """The kernels' sources have one home in a checkout: no copy inside the package to go stale."""
    assert SOURCE_DIR == ROOT / "cuda_src"


def test_every_public_name_is_listed_and_resolves():
    assert {*cufa.__all__} <= {*dir(cufa)}
    assert all(getattr(cufa, name) for name in cufa.__all__)
