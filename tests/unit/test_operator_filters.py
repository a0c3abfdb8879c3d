"""Filters, groups and pages of operators, without a database."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import BoundedCount, ConfigurationError, Event, Filter, Page, State
from outboxio.model.operating import groups
from outboxio.model.operating.groups import Groups, PageCursor, fingerprint
from outboxio.operations.queries.filters import TO_RETRY, Cursor, chosen_filter, cursor_of, filter_argument, frozen
from outboxio.operations.queries.notifications import grouped
from outboxio.storage.protocols import LastError
from outboxio.storage.tables.reads import longest_word

NOW = datetime(2030, 1, 1, 12)


class Paid(Event):
    pass


# --- filters -------------------------------------------------------------------------------------


def test_a_filter_is_validated_and_converted_to_its_stored_form() -> None:
    number = uuid4()
    given = Filter(
        states=["DEAD", State.DEAD, "FAILED"], handler="mail", event_type=Paid, ordering_key=number, model_id=7,
        action=str(number), correlation_id="c", error="E: *x",
        since=datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=1))), until=datetime(2030, 1, 2, tzinfo=UTC),
    )  # type: ignore[arg-type]  # fmt: skip
    assert filter_argument(given) == Filter(
        states=(State.DEAD, State.FAILED), handler="mail", event_type="Paid", ordering_key=str(number), model_id="7",
        action=number, correlation_id="c", error="E: *x", since=datetime(2030, 1, 1, 11), until=datetime(2030, 1, 2),
    )  # fmt: skip
    assert filter_argument(None) == Filter()
    assert filter_argument(Filter(), states=TO_RETRY).states == TO_RETRY
    assert filter_argument(Filter(states=("SKIPPED",)), states=TO_RETRY).states == (State.SKIPPED,)
    assert filter_argument(Filter(action="Pay")).action == "Pay"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"states": ("DEAD",)}, "^filter is {'states': .*; expected a Filter, as in"),
        ("DEAD", "^filter is 'DEAD'; expected a Filter"),
        (Filter(states="DEAD"), r"^states is 'DEAD'; expected a list of them, as in {'DEAD'}"),
        (Filter(states=["DAED"]), "^there is no state 'DAED'; the states are PENDING"),
        (Filter(handler=""), "^handler: '' is blank"),
        (Filter(event_type=7), "^event type: 7 is not a string"),  # type: ignore[arg-type]
        (Filter(model_id="m" * 256), "^model_id: .* has 256 characters"),
        (Filter(ordering_key=b"k"), "^ordering_key is b'k'; expected the key"),  # type: ignore[arg-type]
        (Filter(correlation_id="a\0b"), r"^correlation_id: .* contains NUL"),
        (Filter(action=7), "^action: 7 is not a string"),  # type: ignore[arg-type]
        (Filter(error=" * "), r"^error is ' \* '; expected a part of the last error"),
        (Filter(error="x" * 1001), "^error has 1001 characters; expected at most 1000"),
        (Filter(error=7), "^error is 7; expected a part of the last error"),  # type: ignore[arg-type]
        (Filter(since="today"), "^since is 'today'; expected a datetime"),  # type: ignore[arg-type]
        (Filter(since=NOW, until=NOW), "^since is .*, and until is .*; until must be later than since"),
    ],
    ids=ascii,
)
def test_a_filter_that_matches_nothing_is_refused_with_the_fix(given: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        filter_argument(given)


def test_a_list_takes_a_filter_or_single_fields_but_not_both() -> None:
    assert chosen_filter("DEAD", None, None, None) == Filter(states=(State.DEAD,))
    assert chosen_filter(None, State.DEAD, "mail", "Paid") == Filter(
        states=(State.DEAD,), handler="mail", event_type="Paid"
    )
    assert chosen_filter(Filter(handler="mail"), None, None, None) == Filter(handler="mail")
    with pytest.raises(ConfigurationError, match=r"a Filter and state=\.\.\.; put the value into the Filter"):
        chosen_filter(Filter(), "DEAD", None, None)
    with pytest.raises(ConfigurationError, match=r"a Filter and handler=\.\.\."):
        chosen_filter(Filter(), None, "mail", None)
    with pytest.raises(ConfigurationError, match="two states, 'DEAD' and 'FAILED'"):
        chosen_filter("DEAD", "FAILED", None, None)
    with pytest.raises(ConfigurationError, match=r"there is no state \['DEAD'\]"):
        chosen_filter(["DEAD"], None, None, None)


def test_a_bulk_operation_covers_only_earlier_changes() -> None:
    assert frozen(Filter(), NOW).until == NOW
    assert frozen(Filter(until=NOW - timedelta(days=1)), NOW).until == NOW - timedelta(days=1)
    assert frozen(Filter(until=NOW + timedelta(days=1)), NOW).until == NOW


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type", "message", "shared"),
    [
        ("KeyError", "'ada'", "KeyError: *"),
        ("ConnectionError", "pdf:8080 refused attempt 3", "ConnectionError: pdf:* refused attempt *"),
        ("E", "can't parse \"x y\" at 0x7f3a, don't", "E: can't parse * at *, don't"),
        ("E", "order 5f0e3f8a-1111-4222-8333-123456789abc is gone", "E: order * is gone"),
        ("E", "commit deadbeef01 faded", "E: commit * faded"),
        ("E", "version 1.22.3", "E: version *"),
        ("E", "ada@example.org is unknown", "E: * is unknown"),
        ("E", "no account of 'grace.h+tag@mail.example.co.uk'.", "E: no account of *."),
        ("E", "customer v1@example.org has 3 of user@localhost", "E: customer * has * of user@localhost"),
        ("E", "first line\n  second line", "E: first line*second line"),
        ("E", "", "E:"),
        ("E", "x" * 300, "E: " + "x" * 200 + "*"),
    ],
)
def test_a_fingerprint_omits_details_that_vary_between_equal_errors(type: str, message: str, shared: str) -> None:
    assert fingerprint(type, message) == shared


def test_the_fast_pattern_omits_the_same_as_the_full_pattern() -> None:
    parts = ["'", '"', "`", "0x", "0X1f", " ", "\n", "a", "f", "x1", "don't", "٣", "_", "é", ".", "-", "9", "*", "word"]
    chance = random.Random(3)
    for _ in range(20_000):
        message = "".join(chance.choice(parts) for _ in range(chance.randint(0, 10)))
        if groups._LONG.search(message) is None:
            assert groups._VARYING_SHORT.sub("*", message) == groups._VARYING.sub("*", message), message


def test_the_longest_word_of_a_text_is_unchanged_in_json() -> None:
    assert longest_word(("Error: no", "pdf refused")) == "pdf refused"
    assert longest_word(('ü"\\',)) == longest_word(()) == ""
    assert longest_word(("can't",)) == "can"


@pytest.mark.parametrize(
    "message",
    [
        "'a' 1",
        "ada@example.org, b@c.de at 3",
        "@ @x.y a@b.",
        "a * b",
        "  padded ",
        "ends cut 12345678901 " * 20,
        "ü 😀 7",
        "\t\r\n",
        "*",
    ],
)
def test_a_fingerprint_as_a_filter_matches_its_error(message: str) -> None:
    shared, at = fingerprint("E", message), 0
    for part in filter(None, shared.split("*")):
        at = f"E: {message}".find(part, at)
        assert at >= 0, (shared, part)
        at += len(part)


def test_groups_are_by_handler_and_fingerprint_largest_first() -> None:
    def error(name: str, message: str, second: int) -> LastError:
        return LastError(uuid4(), uuid4(), name, NOW + timedelta(seconds=second), "E", message)

    one = [error("mail", "no 1", 5), error("mail", "no 2", 1), error("pdf", "no 3", 2)]
    two = [error("mail", "no 4", 9)]
    first, second = grouped({"one": one, "two": two}, Filter(states=(State.DEAD,)), lambda text: text)
    assert (first.handler_name, first.fingerprint, first.count, first.shard) == ("mail", "E: no *", 3, "one, two")
    assert (first.first_seen, first.last_seen) == (NOW + timedelta(seconds=1), NOW + timedelta(seconds=9))
    assert (first.sample, first.notification_id) == ("E: no 4", two[0].id)
    assert first.filter == Filter(states=(State.DEAD,), handler="mail", error="E: no *")
    assert (second.handler_name, second.count) == ("pdf", 1)


def test_a_redacted_message_is_in_no_fingerprint() -> None:
    error = LastError(uuid4(), uuid4(), "mail", NOW, "E", "the secret is out")
    [one] = grouped({"one": [error]}, Filter(), lambda text: text.replace("secret", "[]"))
    assert (one.fingerprint, one.sample) == ("E: *", "E: the [] is out")


def test_groups_state_the_rows_they_cover() -> None:
    assert str(Groups([], 12, BoundedCount(12))) == "grouped over all 12"
    assert str(Groups([], 1000, BoundedCount(4310))) == "grouped over the newest 1,000 of 4,310"
    assert str(Groups([], 1000, BoundedCount(10_000, is_complete=False))) == "grouped over the newest 1,000 of 10,000+"


# --- pages ---------------------------------------------------------------------------------------


def test_a_page_is_a_list_with_a_cursor() -> None:
    page = Page([1, 2], "text")
    assert (page, page.next, Page[int]().next) == ([1, 2], "text", None)


def test_a_count_shows_whether_it_reached_its_bound() -> None:
    count = BoundedCount(10_000, is_complete=False)
    assert (count, str(count), f"{count}", f"{count:d}", count > 9) == (10_000, "10,000+", "10,000+", "10000", True)
    assert str(BoundedCount(1234)) == "1,234"


def test_a_cursor_is_parsed_only_for_the_same_filter() -> None:
    filter, cursor = Filter(states=(State.DEAD,)), PageCursor("dead", "mail", ("2030-01-01", str(UUID(int=7))))
    text = Cursor({"one": cursor, "two": None}).text(filter)
    assert text is not None
    assert cursor_of(text, filter, PageCursor).positions == {"one": cursor, "two": None}
    assert Cursor[PageCursor]({}).text(filter) is None
    with pytest.raises(ConfigurationError, match="after belongs to a list with a different filter"):
        cursor_of(text, Filter(), PageCursor)
    for broken in (text[:-5], "x", "", "é", "AAAA", text + "!"):
        with pytest.raises(ConfigurationError, match=r"^after is .*; expected page\.next, or the id"):
            cursor_of(broken, filter, PageCursor)
