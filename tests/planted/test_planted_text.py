"""What planted bugs and mutants replace stands in the sources, once.

Which bugs are run depends on the day, and mutants are run when somebody asks for them; this does not."""

from __future__ import annotations

from pathlib import Path

from mutant_table import MUTANTS, file_of_tests
from test_emulate_planted import BUGS

from cufa.build.compiler import SOURCE_DIR


def test_texts_stand_once():
    for group, bugs in BUGS.items():
        for bug in bugs:
            assert (SOURCE_DIR / bug.file).read_text("utf-8").count(bug.old) == 1, (group, bug.what)
            assert bug.new != bug.old, (group, bug.what)


def test_mutants_apply():
    for mutant in MUTANTS:
        text = (Path(__file__).parents[2] / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, mutant
        assert mutant.after != mutant.before, mutant
        assert [file_of_tests(name) for name in mutant.tests.split()], mutant
