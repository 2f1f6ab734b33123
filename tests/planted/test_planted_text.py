"""What planted bugs and mutants replace stands in the sources, once.

Which bugs are run depends on the day, and mutants are run when somebody asks for them; this does not."""

from __future__ import annotations

from pathlib import Path

import test_emulate_contract_bugs
import test_emulate_planted
from mutant_table import MUTANTS, file_of_tests

from cufa.build.compiler import SOURCE_DIR

#: File and text, by the module that plants the bug and the bug's name.
PLACES = {
    **{
        (group, f"{i} {bug.what}"): (bug.file, bug.old)
        for group, bugs in test_emulate_planted.BUGS.items()
        for i, bug in enumerate(bugs)
    },
    **{("contract", name): (bug.file, bug.old) for name, bug in test_emulate_contract_bugs.PLANTED.items()},
}


def test_texts_stand_once():
    found = {
        place: (SOURCE_DIR / file).read_text("utf-8").count(text) for place, (file, text) in PLACES.items()
    }
    assert {place: n for place, n in found.items() if n != 1} == {}


def test_mutants_apply():
    for mutant in MUTANTS:
        text = (Path(__file__).parents[2] / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, mutant
        assert mutant.after != mutant.before, mutant
        assert [file_of_tests(name) for name in mutant.tests.split()], mutant
