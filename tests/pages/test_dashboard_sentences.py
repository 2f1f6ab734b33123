"""Words around numbers, for none, one, two and many."""

from __future__ import annotations

import dashboard_support  # noqa: F401 - makes cufa.dashboard importable
import pytest

from cufa.dashboard import sentences


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "run", "no runs"),
        (1, "run", "1 run"),
        (2, "run", "2 runs"),
        (12_345, "run", "12,345 runs"),
        (1, "query", "1 query"),
        (2, "query", "2 queries"),
        (1, "thread block", "1 thread block"),
        (3, "thread block", "3 thread blocks"),
    ],
)
def test_a_number_of_things(number: int, noun: str, text: str) -> None:
    assert sentences.count(number, noun) == text


@pytest.mark.parametrize(("number", "word"), [(0, "are"), (1, "is"), (2, "are"), (1000, "are")])
def test_verbs_follow_the_number(number: int, word: str) -> None:
    assert sentences.plural(number, "is") == word


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("ab", "a and b"),
        ("abc", "a, b and c"),
        ("abcdef", "a, b, c, d, e and f"),
        ("abcdefgh", "a, b, c, d, e and 3 more"),
    ],
)
def test_lists(words: str, text: str) -> None:
    assert sentences.listed(words) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "2 s"),
        (8.2, "8 s"),
        (99.0, "99 s"),
        (100.0, "2 min"),
        (3600.0, "60 min"),
        (7200.0, "2.0 h"),
        (259_200.0, "3 days"),
        (253_887_556 * 3600.0, "28,963 years"),
    ],
)
def test_how_long_somebody_waits(number: float, text: str) -> None:
    assert sentences.seconds(number) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0%"), (1e-9, "less than 0.1%"), (0.03, "3.0%"), (0.9999, "more than 99.9%"), (1.0, "100%")],
)
def test_shares_are_nothing_or_all_only_when_they_are(part: float, text: str) -> None:
    assert sentences.share(part) == text
