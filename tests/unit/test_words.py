"""Comments, docstrings and pages name the subject of their sentences: at most 4 % of their words are pronouns.

A file that is still above the limit is in the table with its present share, which can only go down. The tables are
printed by ``python -m tests.kit.words``.
"""

from __future__ import annotations

from collections import Counter

from tests.kit.sources import modules
from tests.kit.words import COUNTED, FEWEST, banned, counted_in, pages, share_of, shares, sum_of

LIMIT = 4.0
"""Percent of the words of a file or page."""
OVERALL = {"outboxio": 1.5, "pages": 2.5}
"""The same for all files together, and for all pages together. The aim is 3.0."""

ABOVE: dict[str, float] = {}

STILL_BANNED: dict[str, int] = {}


def test_no_file_and_no_page_has_more_pronouns_than_it_may() -> None:
    found = {**shares(modules(), FEWEST), **shares(pages())}

    worse = {name: share for name, share in found.items() if share > ABOVE.get(name, LIMIT)}
    assert worse == {}, "name the nouns, or see python -m tests.kit.words"


def test_all_files_together_and_all_pages_together_have_few_pronouns() -> None:
    assert share_of(sum_of(modules())) <= OVERALL["outboxio"]
    assert share_of(sum_of(pages())) <= OVERALL["pages"]


def test_the_table_lists_nothing_that_is_below_the_limit_now() -> None:
    found = {**shares(modules(), FEWEST), **shares(pages())}

    assert {name for name in ABOVE if found.get(name, 0) <= LIMIT} == set()


def test_the_banned_words_are_nowhere_but_where_they_still_are() -> None:
    assert {**banned(modules()), **banned(pages())} == STILL_BANNED


def test_words_are_counted_in_prose_and_not_in_code() -> None:
    words = counted_in("It is `what` it was.\n```python\nthey = those\n```\nNobody's one.")

    assert words == Counter(["it", "is", "it", "was", "nobody's", "one"])
    assert share_of(words) == 50.0
    assert all(word == word.lower() for word in COUNTED)
