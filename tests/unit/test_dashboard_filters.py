"""The filter of a page: URL to filter and back, and the filter in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import parse_qs, urlencode
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Filter, State
from outboxio.cli.choice import Choice
from outboxio.dashboard.filters import (
    WORDS,
    Values,
    filter_of,
    in_words,
    refuse_unknown_words,
)
from outboxio.operations.queries.filters import parse_moment, query_of

NOW = datetime(2030, 1, 2, 12)


def values(query: str) -> Values:
    found = parse_qs(query, keep_blank_values=True)

    def of(word: str) -> Sequence[str]:
        return found.get(word, [])

    return of


def test_the_words_are_those_of_the_command_line() -> None:
    assert set(WORDS) == set(Choice.__struct_fields__)


def test_a_url_says_a_filter() -> None:
    action = uuid4()
    query = (
        "state=dead&state=FAILED&handler=invoice-pdf&type=OrderPaid&key=ada&model=7&correlation=req+7"
        f"&error=ConnectionError%3A+*pdf&since=2h&until=2030-01-02T11%3A30&action={action}&after=x&csrf=y"
    )
    assert filter_of(values(query), now=NOW) == Filter(
        states=(State.DEAD, State.FAILED), handler="invoice-pdf", event_type="OrderPaid", ordering_key="ada",
        model_id="7", action=action, correlation_id="req 7", error="ConnectionError: *pdf",
        since=datetime(2030, 1, 2, 10), until=datetime(2030, 1, 2, 11, 30),
    )  # fmt: skip


def test_empty_fields_of_a_form_do_not_count_and_a_page_has_states_of_its_own() -> None:
    assert filter_of(values("state=&handler=+&key=&since=")) == Filter()
    assert filter_of(values("state="), "DEAD", "EXPIRED").states == (State.DEAD, State.EXPIRED)
    assert filter_of(values("state=skipped"), "DEAD", "EXPIRED").states == (State.SKIPPED,)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("state=DEADD", "'DEADD'; the states are PENDING, "),
        ("since=yesterday", "since is 'yesterday'; expected a date (2026-01-31, 2026-01-31T02:41), or how long ago"),
        ("until=2030-13-01", "until is '2030-13-01'; expected a date"),
        ("handler=a&handler=b", "handler has 2 values, 'a' and 'b'; give handler once"),
        ("since=2030-01-02&until=2030-01-01", "expected an until that is later than since"),
        (f"handler={'x' * 300}", "has 300 characters"),
        ("key=a%00b", "NUL"),
        ("type=a%00b", "NUL"),
        ("error=***", "expected a part of the last error"),
    ],
)
def test_a_wrong_value_is_refused_with_the_value_and_the_remedy(query: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        filter_of(values(query), now=NOW)
    assert told in str(refused.value)


def test_a_misspelt_word_is_refused_because_the_filter_would_be_wider() -> None:
    refuse_unknown_words(["handler", "after"], (*WORDS, "after"))
    with pytest.raises(ConfigurationError, match=r"no filter 'handlr': did you mean 'handler'\?"):
        refuse_unknown_words(["handlr"], WORDS)


def test_a_filter_and_its_query_say_the_same() -> None:
    for filter in (
        Filter(),
        Filter(
            states=(State.DEAD, State.EXPIRED), error="KeyError: '*' & <b>?#%", since=datetime(2030, 1, 1, 0, 0, 0, 7)
        ),
        Filter(handler="ä b", event_type="T", ordering_key=" k\n+", model_id="m", action=uuid4(), correlation_id="c;d"),
        Filter(action="Pay", until=datetime(2030, 1, 1)),
    ):
        assert filter_of(values(urlencode(query_of(filter), doseq=True))) == filter


def test_a_moment_is_a_date_or_how_long_ago() -> None:
    ten = datetime(2030, 1, 2, 10)
    for text in (
        "2h",
        "2h ago",
        "7200",
        "PT2H",
        "2030-01-02T10:00",
        "2030-01-02T11:00+01:00",
        "2030-01-02T11:00 01:00",
    ):
        assert parse_moment(text, now=NOW) == ten, text
    assert parse_moment("2030-01-02") == datetime(2030, 1, 2)
    assert parse_moment("999999d", now=NOW) == datetime.min
    assert parse_moment("0001-01-01T00:00+14:00") == datetime.min
    assert all(parse_moment(text) is None for text in ("", "ago", "soon", "-1h", "2030-02-30", "1e999"))
    now, local = datetime.now(UTC), timezone(timedelta(hours=-3))
    assert parse_moment(now.astimezone(local).isoformat()) == now.replace(tzinfo=None)


def test_a_filter_in_words() -> None:
    assert in_words(Filter()) == "all notifications"
    assert in_words(Filter(), "events") == "all events"
    assert in_words(Filter(states=("DEAD",))) == "DEAD notifications"
    assert in_words(
        Filter(states=("DEAD", "EXPIRED", "FAILED"), handler="pdf", error="E: *", since=datetime(2030, 1, 1, 2, 41))
    ) == (
        "DEAD, EXPIRED or FAILED notifications of the handler “pdf”, with “E: *” in the last error, "
        "changed since 2030-01-01 02:41 UTC"
    )
    assert in_words(Filter(since=datetime(2030, 1, 1), until=datetime(2030, 1, 2, 0, 0, 1)), "events") == (
        "events emitted since 2030-01-01 00:00 UTC and before 2030-01-02 00:00:01 UTC"
    )
