"""What planted bugs and mutants replace stands in the sources, once.

Which bugs are run depends on the day, and mutants are run when somebody asks for them; this does not."""

from __future__ import annotations

from pathlib import Path

import pytest
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


@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_text_stands_once(place):
    file, text = PLACES[place]
    assert (SOURCE_DIR / file).read_text(encoding="utf-8").count(text) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}, {mutant.why}")
def test_a_mutant_applies(mutant):
    text = (Path(__file__).parents[2] / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1
    assert mutant.after != mutant.before
    assert [file_of_tests(name) for name in mutant.tests.split()]
