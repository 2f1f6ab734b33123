"""What planted bugs replace stands in the sources, once: which of them are run depends on the day, this does not."""

from __future__ import annotations

import pytest
import test_emulate_backward_bugs
import test_emulate_backward_bugs_f32
import test_emulate_backward_bugs_hopper

from cufa.nvrtc.compiler import SOURCE_DIR

BUGS = {
    f"{module.__name__}, {name}": bug
    for module in (
        test_emulate_backward_bugs,
        test_emulate_backward_bugs_f32,
        test_emulate_backward_bugs_hopper,
    )
    for name, bug in module.BUGS.items()
}


@pytest.mark.parametrize("name", BUGS)
def test_text_stands_once(name):
    bug = BUGS[name]
    assert (SOURCE_DIR / bug.file).read_text(encoding="utf-8").count(bug.old) == 1
