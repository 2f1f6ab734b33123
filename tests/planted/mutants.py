"""Wrong versions of cufa, each of which the tests must notice: ``make mutants``.

Each mutant is one place of the code, changed so that a result, an error or a promise is wrong. It is made in a copy of
the repository, where the tests that serve its file are run until the first fails; a mutant that no test notices
survives, and then a test is missing. Tests run as ``make test`` does, with the sample of large products; with
``--every-case``, what survives the sample is run with every case, which shows whether the sample has lost it. The
numbers, and mutants that are not killed, are recorded in ``tests/planted/mutants.txt``.

    make mutants                          all of them, and the outcome into tests/planted/mutants.txt
    make mutants ARGS="mask.py fa2"       those whose file, text or reason has one of these words
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mutant_table import MUTANTS, Mutant, file_of_tests

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".txt")
_COPIED = ("cufa", "cuda_src", "dashboard", "tests", "pyproject.toml", "README.md", "Makefile")

_MOST_SECONDS = 900

KILLED, KILLED_BY_ALL, SURVIVED, STALE = (
    "killed",
    "killed by every case only",
    "SURVIVED",
    "does not apply any more",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str
    by: str = ""
    """The first test that noticed it."""

    def __str__(self) -> str:
        place = self.mutant.file.removeprefix("cufa/").removeprefix("cuda_src/")
        return f"{place:28} {self.verdict:9} {self.mutant.why}" + (f"  [{self.by}]" if self.by else "")


@contextlib.contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[bool]:
    """The copy with this change in it; False where the text is not there, or more than once."""
    path = tree / mutant.file
    sound = path.read_text(encoding="utf-8")
    if sound.count(mutant.before) != 1:
        yield False
        return
    path.write_text(sound.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        yield True
    finally:
        path.write_text(sound, encoding="utf-8")


def first_failure(tree: Path, mutant: Mutant, *options: str) -> str | None:
    """The first test that fails on the copy, None when all pass. A run that dies or hangs has noticed too."""
    files = [str(file_of_tests(name).relative_to(ROOT)) for name in mutant.tests.split()]
    pytest = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, *pytest, *options, *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False, preexec_fn=_limited
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"it ends with status {done.returncode}"


def _limited() -> None:
    """Of a mutant that never ends: processor time, so that a busy machine changes nothing."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))


def judge(tree: Path, mutant: Mutant, every_case: bool) -> Outcome:
    with mutated(tree, mutant) as applies:
        if not applies:
            return Outcome(mutant, STALE)
        by = first_failure(tree, mutant)
        if by is not None:
            return Outcome(mutant, KILLED, by)
        by = first_failure(tree, mutant, "--every-case") if every_case else None
        return Outcome(mutant, SURVIVED) if by is None else Outcome(mutant, KILLED_BY_ALL, by)


def judge_all(mutants: list[Mutant], jobs: int, every_case: bool) -> Iterator[Outcome]:
    """In the order of the mutants."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def judge_one(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return judge(tree, mutant, every_case)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="cufa-mutants-") as folder:
        for job in range(jobs):
            tree = Path(folder, str(job))
            tree.mkdir()
            for name in _COPIED:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, tree / name)
            trees.put(tree)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(judge_one, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--every-case", action="store_true", help="run what survives with every case, too")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [m for m in MUTANTS if any(w in f"{m.file} {m.why} {m.after}" for w in words)]
    outcomes = []
    for outcome in judge_all(chosen, options.jobs, options.every_case):
        outcomes.append(outcome)
        print(outcome, flush=True)
    text = summary(outcomes)
    print(text)
    if not options.words:
        RECORD.write_text(text + "".join(f"{x}\n" for x in outcomes if x.verdict != KILLED), encoding="utf-8")
    return any(x.verdict != KILLED for x in outcomes)


def summary(outcomes: list[Outcome]) -> str:
    """A line per language and verdict."""
    lines = []
    for language, suffixes in (("Python", (".py",)), ("CUDA", (".cu", ".cuh"))):
        of_it = [x for x in outcomes if x.mutant.file.endswith(suffixes)]
        verdicts = {x.verdict: sum(y.verdict == x.verdict for y in of_it) for x in of_it}
        lines.append(
            f"{language}: {len(of_it)} mutants: " + ", ".join(f"{n} {v}" for v, n in verdicts.items())
        )
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
