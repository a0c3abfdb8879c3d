"""The filter of a page: parsed from a URL, written to a URL, and described as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import parse_qs, urlencode
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Filter, State
from outboxio.cli.filter_options import FilterOptions
from outboxio.dashboard.filters import (
    PARAMETERS,
    Values,
    describe_filter,
    filter_of,
    refuse_unknown_parameters,
)
from outboxio.operations.queries.filters import parse_time, query_of

NOW = datetime(2030, 1, 2, 12)


def values(query: str) -> Values:
    found = parse_qs(query, keep_blank_values=True)

    def of(label: str) -> Sequence[str]:
        return found.get(label, [])

    return of


def test_filter_parameters_match_the_cli_options() -> None:
    assert set(PARAMETERS) == set(FilterOptions.__struct_fields__)


def test_a_url_contains_a_filter() -> None:
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


def test_empty_form_fields_are_ignored_and_a_page_has_default_states() -> None:
    assert filter_of(values("state=&handler=+&key=&since=")) == Filter()
    assert filter_of(values("state="), "DEAD", "EXPIRED").states == (State.DEAD, State.EXPIRED)
    assert filter_of(values("state=skipped"), "DEAD", "EXPIRED").states == (State.SKIPPED,)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("state=DEADD", "'DEADD'; the states are PENDING, "),
        ("since=yesterday", "since is 'yesterday'; expected a date (2026-01-31, 2026-01-31T02:41), or how long ago"),
        ("until=2030-13-01", "until is '2030-13-01'; expected a date"),
        ("handler=a&handler=b", "handler has 2 values, 'a' and 'b'; use handler only once"),
        ("since=2030-01-02&until=2030-01-01", "until must be later than since"),
        (f"handler={'x' * 300}", "has 300 characters"),
        ("key=a%00b", "NUL"),
        ("type=a%00b", "NUL"),
        ("error=***", "expected a part of the last error"),
    ],
)
def test_a_wrong_value_is_refused_with_the_value_and_fix(query: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        filter_of(values(query), now=NOW)
    assert message in str(refused.value)


def test_a_misspelt_parameter_is_refused_because_it_would_widen_the_filter() -> None:
    refuse_unknown_parameters(["handler", "after"], (*PARAMETERS, "after"))
    with pytest.raises(ConfigurationError, match=r"no filter 'handlr': did you mean 'handler'\?"):
        refuse_unknown_parameters(["handlr"], PARAMETERS)


def test_a_filter_survives_a_round_trip_through_its_query() -> None:
    for filter in (
        Filter(),
        Filter(
            states=(State.DEAD, State.EXPIRED), error="KeyError: '*' & <b>?#%", since=datetime(2030, 1, 1, 0, 0, 0, 7)
        ),
        Filter(handler="ä b", event_type="T", ordering_key=" k\n+", model_id="m", action=uuid4(), correlation_id="c;d"),
        Filter(action="Pay", until=datetime(2030, 1, 1)),
    ):
        assert filter_of(values(urlencode(query_of(filter), doseq=True))) == filter


def test_a_time_is_a_date_or_an_age() -> None:
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
        assert parse_time(text, now=NOW) == ten, text
    assert parse_time("2030-01-02") == datetime(2030, 1, 2)
    assert parse_time("999999d", now=NOW) == datetime.min
    assert parse_time("0001-01-01T00:00+14:00") == datetime.min
    assert all(parse_time(text) is None for text in ("", "ago", "soon", "-1h", "2030-02-30", "1e999"))
    now, local = datetime.now(UTC), timezone(timedelta(hours=-3))
    assert parse_time(now.astimezone(local).isoformat()) == now.replace(tzinfo=None)


def test_a_filter_is_described_in_text() -> None:
    assert describe_filter(Filter()) == "all notifications"
    assert describe_filter(Filter(), "events") == "all events"
    assert describe_filter(Filter(states=("DEAD",))) == "DEAD notifications"
    assert describe_filter(
        Filter(states=("DEAD", "EXPIRED", "FAILED"), handler="pdf", error="E: *", since=datetime(2030, 1, 1, 2, 41))
    ) == (
        "DEAD, EXPIRED or FAILED notifications of the handler “pdf”, with “E: *” in the last error, "
        "changed since 2030-01-01 02:41 UTC"
    )
    assert describe_filter(Filter(since=datetime(2030, 1, 1), until=datetime(2030, 1, 2, 0, 0, 1)), "events") == (
        "events emitted since 2030-01-01 00:00 UTC and before 2030-01-02 00:00:01 UTC"
    )
