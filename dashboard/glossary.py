"""Terms of the pages, with at most two sentences each: ``glossary.md``.

Headings, metrics and verdicts explain their terms (:mod:`cufa.dashboard.page`); each page has the whole list in a
popover.
"""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

_TEXT = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
TERMS: dict[str, str] = dict(re.findall(r"^\*\*(.+?)\*\*: (.+)$", _TEXT, re.MULTILINE))
"""Explanations by term, as written in a sentence."""


def terms_in(text: str) -> list[str]:
    """Terms of a text in order, each once."""
    seen = (_term(match) for match in _pattern().finditer(text))
    return list(dict.fromkeys(seen))


def help_text(text: str) -> str | None:
    """Markdown that explains the terms of a heading or a metric; None without terms."""
    lines = [f"**{term}**: {TERMS[term]}" for term in terms_in(text)]
    return "\n\n".join(lines) or None


def explained(text: str) -> str:
    """A sentence as HTML: the first use of each term shows its explanation on hover and focus."""
    explained_terms: set[str] = set()
    parts, end = [], 0
    for match in _pattern().finditer(text):
        term = _term(match)
        parts.append(html.escape(text[end : match.start()]))
        end = match.end()
        word = html.escape(match[0])
        if term in explained_terms:
            parts.append(word)
            continue
        explained_terms.add(term)
        tip = html.escape(TERMS[term], quote=True)
        parts.append(
            f'<span class="cufa-term" tabindex="0" data-tip="{tip}" aria-description="{tip}">{word}</span>'
        )
    return "".join([*parts, html.escape(text[end:])])


def as_markdown() -> str:
    """The whole list."""
    return "  \n".join(f"**{term}**: {TERMS[term]}" for term in TERMS)


_FORMS = {
    "place": r"places|(?:busiest|free|[\d,]+) place",
    "share": r"[\d,]+ shares?|shares of all tiles",
    "partial": "partial(?! results?)",
    "product": "products",
    "lse": "lse|LSE|log-sum-exp",
    "L2": "L2",
}
"""Patterns of terms that have another spelling, or an everyday meaning too."""


@functools.cache
def _pattern() -> re.Pattern[str]:
    """Longer terms come first: "cold L2" before "L2". A plural is the same term."""
    forms = {term: _FORMS.get(term, rf"{re.escape(term)}(?:e?s)?") for term in TERMS}
    parts = (f"(?P<_{n}>{forms[term]})" for n, term in enumerate(_words()))
    return re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])", re.IGNORECASE)


@functools.cache
def _words() -> list[str]:
    return sorted(TERMS, key=lambda term: -len(term))


def _term(match: re.Match[str]) -> str:
    return _words()[int(str(match.lastgroup)[1:])]
