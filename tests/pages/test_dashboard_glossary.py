"""Glossary terms, source lines of figures, and numbers in sentences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dashboard_support  # noqa: F401 - makes cufa.dashboard importable
import pytest
from dashboard_support import APP

from cufa.build.compiler import SOURCE_DIR
from cufa.dashboard import glossary, sentences
from cufa.dashboard.model import source

# --- Words ------------------------------------------------------------------------------------------------


def test_a_meaning_is_two_sentences_at_most() -> None:
    for meaning in glossary.TERMS.values():
        assert meaning.endswith(".") and len(re.findall(r"[.!?](?:\s|$)", meaning)) <= 2, meaning


def test_words_are_found_whole_in_any_number_and_the_longest_first() -> None:
    text = "Thread blocks wait for the tail of the last waves; 3 query blocks, masks, biased SMs, cold L2 and L2."
    assert glossary.terms_in(text) == [
        "thread block", "tail", "wave", "query block", "mask", "SM", "cold L2", "L2",
    ]  # fmt: skip
    assert glossary.terms_in("The detail of wavefronts, maskings and smart splitters") == []


def test_words_of_everyday_are_explained_only_where_they_are_terms() -> None:
    everyday = "K and V take the place of the last ones; a share of it; a product of ours; this page"
    assert glossary.terms_in(everyday) == []
    terms = ["place", "product", "paged", "share"]
    assert glossary.terms_in("12 places, products; paged, and 7 shares") == terms


def test_a_sentence_keeps_its_words_and_each_is_told_once() -> None:
    text = 'A <wave> & more waves of "splits"'
    told = glossary.explained(text)
    assert told.count("cufa-term") == 2
    plain = re.sub(r"<[^>]*>", "", told)
    assert plain == "A &lt;wave&gt; &amp; more waves of &quot;splits&quot;"
    assert glossary.TERMS["split"] in told


def test_help_is_none_where_nothing_is_to_be_explained() -> None:
    assert glossary.help_text("Download") is None
    assert glossary.help_text("On the SMs") == f"**SM**: {glossary.TERMS['SM']}"


# --- Lines of the kernels ---------------------------------------------------------------------------------


_SHOWN = [*source.FIGURES.values(), *(found.values() for found in source.PHASES.values())]
EXCERPTS = dict.fromkeys(itertools.chain.from_iterable(_SHOWN))


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda x: f"{x.file}: {x.title}")
def test_an_excerpt_is_found_where_it_says(excerpt: source.Excerpt) -> None:
    first, lines = excerpt.lines
    text = (SOURCE_DIR / excerpt.file).read_text(encoding="utf-8").splitlines()
    assert excerpt.marker in text[first - 1]
    assert text[first - 1 : first - 1 + len(lines)] == lines
    assert 3 <= len(lines) <= 60
    assert any(not line.strip().startswith("//") for line in lines), "nothing but a comment"
    shown = excerpt.numbered.splitlines()
    assert [int(line.split()[0]) for line in shown] == list(range(first, first + len(lines)))


def test_a_marker_that_is_gone_or_not_alone_is_told() -> None:
    for marker, count in (("no such words", "0"), ("Alg. 1, l.", r"\d+")):
        with pytest.raises(LookupError, match=f"in {count} lines: it must be in one"):
            source.Excerpt("", "forward/fa2/kernel.cu", marker).lines  # noqa: B018


def test_every_phase_of_the_walkthrough_has_its_lines() -> None:
    for algorithm in ("fa1", "fa2"):
        assert {"Load", "Score", "Rescale", "Add"} <= source.PHASES[algorithm].keys()


def test_lines_stand_beside_figures_that_there_are() -> None:
    views = "\n".join(path.read_text("utf-8") for path in (Path(APP).parent / "views").glob("*.py"))
    for key in source.FIGURES:
        page_name, _, figure = key.partition(".")
        assert f'"{key}"' in views or f'"{page_name}.{{name}}"' in views, key
        assert figure or key == "roofline"


@pytest.mark.parametrize(
    ("said", "cases"),
    [
        (lambda n: sentences.count(n, "run"), {0: "no runs", 1: "1 run", 2: "2 runs", 12_345: "12,345 runs"}),
        (lambda n: sentences.count(n, "query"), {1: "1 query", 2: "2 queries"}),
        (lambda n: sentences.count(n, "thread block"), {1: "1 thread block", 3: "3 thread blocks"}),
        (lambda n: sentences.plural(n, "is"), {0: "are", 1: "is", 2: "are", 1000: "are"}),
        (sentences.listed, {"": "", "a": "a", "ab": "a and b", "abc": "a, b and c",
                            "abcdef": "a, b, c, d, e and f", "abcdefgh": "a, b, c, d, e and 3 more"}),
        (sentences.seconds, {0.0: "2 s", 8.2: "8 s", 99.0: "99 s", 100.0: "2 min", 3600.0: "60 min", 7200.0: "2.0 h",
                             259_200.0: "3 days", 253_887_556 * 3600.0: "28,963 years"}),
        (sentences.share, {0.0: "0%", 1e-9: "less than 0.1%", 0.03: "3.0%", 0.9999: "more than 99.9%", 1.0: "100%"}),
    ],
    ids=["runs", "queries", "thread blocks", "verbs", "lists", "seconds", "shares"],
)  # fmt: skip
def test_numbers_in_sentences(said: Callable[[Any], str], cases: dict[Any, str]) -> None:
    """Shares are nothing or all only when they are."""
    assert {x: said(x) for x in cases} == cases
