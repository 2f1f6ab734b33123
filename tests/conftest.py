"""What a run of the tests leaves out, and where the rest runs.

What a machine lacks is no failure: tests that need a GPU, or a C++ compiler to execute kernels on the CPU, are skipped,
with the reason counted and shown. Of large products of parameters a day's run takes a sample (see sampling.py).
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest
import sampling
from changed_sources import with_changed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="every case of sampled tests, which takes an hour or more"
    )


# JAX takes three quarters of a GPU's memory when a process first uses it. Processes share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_KEPT_BYTES = 1 << 30
"""Memory of a GPU that a process may keep from one test to the next."""


def pytest_configure(config: pytest.Config) -> None:
    every_case = config.getoption("--every-case")
    sampling.settle_date(every_case)
    # How long an example takes says how busy the machine is. A day's run draws the same examples as every other, or a
    # change could fail over one that has nothing to do with it; the nightly run draws new ones.
    hypothesis.settings.register_profile(
        "cufa",
        deadline=None,
        derandomize=not every_case,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("cufa")


def pytest_report_header() -> str:
    return f"cases of sampled tests: {sampling.VARIABLE}={sampling.date()}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: the tests in a browser mostly wait."""
    return (os.process_cpu_count() if sys.version_info >= (3, 13) else len(os.sched_getaffinity(0))) + 1


@functools.cache
def why_no_gpu() -> str | None:
    """None when kernels can run here."""
    try:
        from cufa.run.cuda import backend as cuda
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    if cuda.device_count() == 0:
        return "CuPy sees no NVIDIA GPU"
    try:
        cuda.current_device()
    except ValueError as error:
        return str(error)
    return None


def why_no_compiler() -> str | None:
    """None when kernels can be compiled for execution on this CPU."""
    from cufa.run.emulate import build as host_build

    try:
        host_build.cxx()
    except host_build.CompilerError:
        return "needs a C++ compiler: apt-get install g++"
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Executed kernels: a case of a contract says it by its backend, other tests by the name of their file."""
    if item.path.name.startswith("test_emulate"):
        item.add_marker(pytest.mark.emulate)


@pytest.hookimpl(trylast=True)  # after -k and -m: the sample is of what they select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_sample(config, items)
    items.sort(key=_turn)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    _skip(on_gpu, f"needs a GPU: {why_no_gpu()}" if on_gpu and why_no_gpu() else None)
    _skip([item for item in items if _is_of_executor(item)], why_no_compiler())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What there is once tests are found stays to the end: garbage is not looked for before, nor among it later.
    Streamlit looks for garbage after every run of a page, and would go through thousands of tests each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # after fixtures have dropped their arrays
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give back memory that other processes need, after tests that used much of it."""
    if not item.get_closest_marker("gpu"):
        return
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy and cupy.get_default_memory_pool().total_bytes() > _KEPT_BYTES:
        cupy.get_default_memory_pool().free_all_blocks()
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


def _turn(item: pytest.Item) -> int:
    """What takes longest comes first, or one process would be left alone with it at the end."""
    if item.get_closest_marker("e2e"):
        return 0
    if _is_of_one_process(item.nodeid) or item.get_closest_marker("slow"):
        return 1
    return 2 if _is_of_executor(item) else 3


def _skip(items: list[pytest.Item], reason: str | None) -> None:
    for item in items if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def _keep_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            cases_of.setdefault(_scope_of(item.nodeid), []).append(item)
    left_out: set[pytest.Item] = set()
    for test, cases in cases_of.items():
        backend = _backend_of(test)
        marks = [
            mark for mark in cases[0].iter_markers("sampled") if mark.kwargs.get("on", backend) == backend
        ]
        mark = marks[0] if marks else None
        of_executor = _is_of_executor(cases[0]) and len(cases) > sampling.FEW
        if mark or of_executor:
            options = {name: x for name, x in mark.kwargs.items() if name != "on"} if mark else {}
            if of_executor and "each" not in options:
                options = {**sampling.EXECUTOR, **options}
            kept = sampling.chosen([item.callspec.params for item in cases], test, **options)
            left_out |= {item for i, item in enumerate(cases) if i not in kept}
    in_turn = [item for item in items if item.get_closest_marker("in_turn")]
    today = {*sampling.fifth_of_today([*dict.fromkeys(_scope_of(item.nodeid) for item in in_turn)])}
    left_out |= {item for item in in_turn if _scope_of(item.nodeid) not in today}
    if why_no_gpu():  # one case of a test says why all are skipped
        on_gpu = [item for item in items if item.get_closest_marker("gpu") and item not in left_out]
        left_out |= {*on_gpu} - {*{_scope_of(item.nodeid): item for item in on_gpu}.values()}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _is_of_executor(item: pytest.Item) -> bool:
    """Compiles kernels for this CPU and executes them."""
    return item.get_closest_marker("emulate") is not None


def _scope_of(nodeid: str) -> str:
    """The test, and the backend where a test has several: these cases are sampled together, in one process."""
    test, _, parameters = nodeid.partition("[")
    backend = re.match(r"(cpu|emulate|gpu)[-\]]", parameters)
    return f"{test}[{backend[1]}" if backend else test


def _backend_of(scope: str) -> str | None:
    return scope.partition("[")[2] or None


#: Files whose tests share what is made once per process: a browser and a server, a runtime, a build taken apart, a
#: wheel, rows, the list of builds.
_ONE_PROCESS = (
    "test_dashboard_", "test_emulate_builds", "test_machine_code", "test_packaging", "test_evidence",
    "test_measured", "test_recorder", "test_variants",
)  # fmt: skip


def _is_of_one_process(nodeid: str) -> bool:
    return _is_in_browser(nodeid) or Path(_file_of(nodeid)).name.startswith(_ONE_PROCESS)


def _is_in_browser(nodeid: str) -> bool:
    """These share a served dashboard."""
    return "/e2e/" in _file_of(nodeid)


def _file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With --dist loadscope: the cases of a test on a backend run in one process, one after the other, since most share
    a build; so do the tests of some files. Cases on a GPU go to any process: their builds are shared on disk."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if _is_in_browser(nodeid):
                return "in a browser"
            scope = _file_of(nodeid) if _is_of_one_process(nodeid) else _scope_of(nodeid)
            return nodeid if _backend_of(scope) == "gpu" else scope

    return ByTest(config, log)


@pytest.fixture
def nvrtc() -> None:
    """Of tests that compile: skipped, with the reason, where there is no compiler."""
    from cufa.build.static_compile import MissingCompilerError, nvrtc_version

    try:
        nvrtc_version()
    except MissingCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """``plant(file, old, new)``: kernels compiled next have ``new`` where the file has ``old``, which occurs once."""
    from cufa.build import compiler

    def apply(file: str, old: str, new: str) -> None:
        found = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8").count(old)
        assert found == 1, f"{old!r} occurs {found} times in {file}"
        sources = with_changed(tmp_path, file, lambda text: text.replace(old, new))
        monkeypatch.setattr(compiler, "SOURCE_DIR", sources)

    return apply


@pytest.fixture(scope="session")
def cp() -> object:
    """CuPy, of tests on a GPU."""
    return pytest.importorskip("cupy")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests about the host path, also on a machine with a GPU."""
    from cufa.calls import dispatch

    monkeypatch.setattr(dispatch, "gpu_available", lambda: False)
