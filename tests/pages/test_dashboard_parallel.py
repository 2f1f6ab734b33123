"""The page Several GPUs under Streamlit's AppTest."""

from __future__ import annotations

import pytest
from dashboard_page_support import has, open_page, words

import cufa.parallel as par
from cufa.dashboard.charts.ranks import describe_owners, owners
from cufa.dashboard.theme import LIGHT


def test_the_page_says_what_the_plan_says() -> None:
    found = par.plan((1, 16, 32768, 128), ranks=2, placement="zigzag", causal=True, rate=620e12)
    said = words(open_page("parallel"))
    assert f"zigzag on 2 ranks: {found.seconds * 1e3:.2f} ms" in said or f"{found.efficiency:.1%}" in said
    assert "predicted</span>" in said and "measured</span>" not in said
    assert "gets kv 8192-24575 from rank 1" in said


@pytest.mark.parametrize(
    "link",
    [
        {"ranks": "4", "placement": "contiguous", "scheme": "2d", "kv": "2", "direction": "backward"},
        {"ranks": "3", "placement": "heads", "mask": "window", "left": "511"},
        {"ranks": "1", "tokens": "1", "link": "pcie5"},
    ],
    ids=lambda x: x["ranks"],
)
def test_other_links(link: dict[str, str]) -> None:
    app = open_page("parallel", **link)
    assert not app.exception and "predicted</span>" in words(app)


def test_a_scheme_that_needs_another_placement_says_so() -> None:
    app = open_page("parallel", placement="contiguous", scheme="zigzag")
    has(words(app), "takes placement 'zigzag'")


def test_the_map_has_the_owner_of_every_visible_block() -> None:
    found = par.plan((1, 4, 256, 64), ranks=2, placement="zigzag", causal=True)
    ranks = owners(found, LIGHT).data[0].z
    assert ranks[0, 0] == 0 and ranks[-1, 0] == 0 and ranks[32, 0] == 1  # chunks 0 and 3, 1 and 2
    assert ranks[0, -1] != ranks[0, -1]  # hidden: NaN
    assert "rank 0 50.0%" in describe_owners(found)
