"""The search for notifications, on every database, compared with a naive filter in Python."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from outboxio import ConfigurationError, Filter, Outbox
from outboxio.model.notification import FIRST_DEFERRED, NotificationRecord, State
from outboxio.model.operating.groups import PageCursor, Search
from outboxio.operations.queries.filters import Cursor
from outboxio.storage.protocols.operating import Counted, Found
from outboxio.storage.tables.scanner import MAX_EVENTS
from outboxio.storage.tables.scans import Bounds
from outboxio.storage.tables.search import NotificationSearch
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.rows import EventRow, Row, at, insert

STATES = tuple(State)
NAMES = ("ledger", "mail", "Mail", "wide", "z'\\")
TYPES = ("MoneyDeposited", "MoneySpent")
KEYS = (None, None, "", "a", "A", "b'\\", "ä")
CORRELATIONS = (None, "request-1", "request-2")
ACTIONS = [UUID(int=number) for number in (1, 2, 3)]
MANY = 100_000

ERRORS = [
    json.dumps([{"type": "ValueError", "message": "no 17"}]),
    json.dumps([{"type": "ValueError", "message": "no"}, {"type": "Error", "message": "100% of 5_s *[?]| \\ '"}]),
    json.dumps([{"type": "KeyError", "message": "ünknown “key”\nnext line"}]),
    json.dumps([{"type": "valueerror", "message": "NO 17"}]),
    "[]", "[{}]", "[7]", '"text"', "{}", "null", "[[1]]", '{"type": "ValueError", "message": "no 17"}',
    '[{"type": "ValueError"}]', '[{"type": 7, "message": "no 17"}]', '[{"type": "ValueError", "message": null}]',
    '[{"type": "ValueError", "message": "no 17"}, null]', '[{"type": "Value\\u0045rror", "message": "no 17"}]',
]  # fmt: skip
TEXTS: list[tuple[str, ...]] = [
    ("ValueError",), ("ValueError: no",), ("no", "17"), ("17", "no"), ("100%",), ("5_s",), ("*[?]",), ("|",), ("\\",),
    ("'",), ("%",), ("_",), ("ünknown",), ("“key”\n",), ("Value", "Error", ": "), ("ValueErrorr",), ("[",), ("?", "|"),
]  # fmt: skip


def generated(chance: random.Random) -> Iterator[Row]:
    """Rows of all kinds, with many equal dates, and events with several handlers."""
    for number in range(60):
        event = Row().but(
            sequence=number, correlation_id=chance.choice(CORRELATIONS), action_id=chance.choice(ACTIONS),
            action_name=chance.choice(("Deposit", "deposit")), model_id=chance.choice((None, "1", "2")),
            event_type=chance.choice(TYPES), namespace="app" if number % 10 else "another",
        )  # fmt: skip
        for name in chance.sample(NAMES, chance.randint(1, len(NAMES))):
            yield event.but(
                event_id=event.event_id, sequence=event.sequence, handler_name=name, state=chance.choice(STATES),
                ordering_key=chance.choice(KEYS), errors=chance.choice(ERRORS),
                updated_date=at(chance.randint(0, 20)),
                next_retry_at=chance.choice((at(chance.randint(0, 9)), FIRST_DEFERRED)),
                partition_number=chance.randrange(3) if name == "wide" else 0,
            )  # fmt: skip


def searches(chance: random.Random, number: int) -> Iterator[Search]:
    """Each field alone, then fields together."""
    yield Search()
    for state in STATES:
        yield Search(states=(state,))
    for texts in TEXTS:
        yield Search(error=texts)
    for _ in range(number):
        yield Search(
            states=tuple(chance.sample(STATES, chance.choice((0, 1, 2, 3)))),
            names=chance.choice((None, None, ("ledger",), ("mail", "wide", "nobody"), ())),
            event_types=chance.choice(((), (), ("MoneySpent",), TYPES)),
            ordering_key=chance.choice((None, None, None, "a", "")),
            model_id=chance.choice((None, None, None, "1")),
            action_name=chance.choice((None, None, None, "Deposit")),
            action_id=chance.choice((None, None, None, ACTIONS[0])),
            correlation_id=chance.choice((None, None, None, "request-1", "nobody's")),
            error=chance.choice(((), (), (), ("ValueError",), ("no", "17"))),
            since=chance.choice((None, None, at(5))), until=chance.choice((None, None, at(15), at(5))),
        )  # fmt: skip


def matches(search: Search, row: Row) -> bool:
    return (
        row.namespace == "app"
        and (not search.states or row.state in search.states)
        and (search.names is None or row.handler_name in search.names)
        and (not search.event_types or row.event_type in search.event_types)
        and search.ordering_key in (None, row.ordering_key)
        and search.model_id in (None, row.model_id)
        and search.action_name in (None, row.action_name)
        and search.action_id in (None, row.action_id)
        and search.correlation_id in (None, row.correlation_id)
        and (not search.error or has_error(search.error, row))
        and (search.since is None or row.updated_date >= search.since)
        and (search.until is None or row.updated_date < search.until)
    )


def has_error(texts: Sequence[str], row: Row) -> bool:
    errors = json.loads(row.errors)
    last = errors[-1] if isinstance(errors, list) and errors else None
    if not isinstance(last, dict):
        return False
    kind, message = last.get("type"), last.get("message")
    if not isinstance(kind, str) or not isinstance(message, str):
        return False
    whole, start = f"{kind}: {message}", 0
    for text in texts:
        found = whole.find(text, start)
        if found < 0:
            return False
        start = found + len(text)
    return True


@pytest.fixture
def repository(outbox: Outbox) -> NotificationSearch:
    repository: NotificationSearch = database_of(outbox).search
    return repository


@pytest.fixture
async def rows(repository: NotificationSearch, look: Look) -> list[Row]:
    rows = list(generated(random.Random(7)))
    await insert(look, rows)
    await insert(look, {row.event_id: EventRow(
        id=row.event_id, correlation_id=row.correlation_id, action_id=row.action_id, namespace=row.namespace,
    ) for row in rows}.values())  # fmt: skip
    if not look.is_file:
        await look.fetch(f"INSERT INTO {{handler_partitions}} VALUES ('app', 'wide', 2, 3, 2, '{at(0)}', NULL, NULL)")
    return rows


async def paged(
    repository: NotificationSearch, search: Search, limit: int, most: int | None
) -> list[list[NotificationRecord]]:
    pages: list[list[NotificationRecord]] = []
    position: PageCursor | None = None
    while True:
        page = await repository.find("app", search, limit, position, most=most)
        pages.append(list(page.rows))
        if page.next is None:
            return pages
        assert page.next != position, "each page continues after the previous one"
        position = page.next


@pytest.mark.slow
async def test_each_matching_row_is_counted_and_on_one_page(repository: NotificationSearch, rows: list[Row]) -> None:
    chance = random.Random(11)
    unfinished = (State.PENDING, State.FAILED, State.BLOCKED, State.DYING)
    several = [Search(states=states) for number in (2, 3, 4) for states in combinations(unfinished, number)]
    for search in (*several, *searches(chance, 60)):
        expected = sorted(str(row.id) for row in rows if matches(search, row))
        whole = await repository.find("app", search, 1000)
        assert sorted(str(row.id) for row in whole.rows) == expected, search
        assert whole.next is None

        limit, most = chance.choice((1, 3, 7, 50)), chance.choice((1, 5, 20, MANY))
        pages = await paged(repository, search, limit, most)
        assert [row.id for page in pages for row in page] == [row.id for row in whole.rows], (search, limit, most)
        assert all(len(page) <= limit for page in pages)

        counted = await repository.count("app", search, MANY)
        assert (counted.number, counted.is_complete) == (len(expected), True), search


async def all_of(repository: NotificationSearch, search: Search) -> list[NotificationRecord]:
    return list((await repository.find("app", search, 1000)).rows)


async def test_a_row_that_settles_during_the_search_is_not_in_its_former_state(
    repository: NotificationSearch, rows: list[Row], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, search = repository._scanner.find, Search(states=(State.PENDING,))

    async def settled_after_it_is_found(*args: Any) -> Found[str, PageCursor]:
        found = await find(*args)
        await look.fetch(f"UPDATE {{event_notifications}} SET state = 'SUCCEEDED' WHERE id = '{found.rows[0]}'")
        return found

    before = await all_of(repository, search)
    monkeypatch.setattr(repository._scanner, "find", settled_after_it_is_found)
    assert [row.id for row in await all_of(repository, search)] == [row.id for row in before[1:]]


async def test_dead_and_expired_rows_come_newest_first_over_all_handlers(
    repository: NotificationSearch, rows: list[Row]
) -> None:
    found = await all_of(repository, Search(states=(State.DEAD, State.EXPIRED)))

    assert len({row.handler_name for row in found}) == len(NAMES)
    assert [row.updated_date for row in found] == sorted((row.updated_date for row in found), reverse=True)


async def test_waiting_rows_come_by_due_date_over_all_handlers(repository: NotificationSearch, rows: list[Row]) -> None:
    found = await all_of(repository, Search(states=(State.PENDING, State.FAILED)))

    places = [(row.next_retry_at, row.sequence) for row in found]
    assert places == sorted(places, reverse=True)
    assert found[0].next_retry_at == FIRST_DEFERRED


async def test_all_rows_come_by_event_and_newest_first(repository: NotificationSearch, rows: list[Row]) -> None:
    for search in (Search(), Search(correlation_id="request-1")):
        found = await all_of(repository, search)
        assert len({row.state for row in found}) == len(STATES)
        assert [row.event_id for row in found] == sorted((row.event_id for row in found), reverse=True)


async def test_a_page_continues_after_the_id_of_a_row(repository: NotificationSearch, rows: list[Row]) -> None:
    for search in (
        Search(), Search(states=(State.DEAD,)), Search(states=(State.PENDING, State.BLOCKED, State.EXPIRED)),
        Search(action_id=ACTIONS[0]),
    ):  # fmt: skip
        found = await all_of(repository, search)
        position = await repository.cursor_of_notification("app", search, found[4].id)
        page = await repository.find("app", search, 1000, position)
        assert [row.id for row in page.rows] == [row.id for row in found[5:]], search

    dead = await all_of(repository, Search(states=(State.DEAD,)))
    assert await repository.cursor_of_notification("app", Search(states=(State.PENDING,)), dead[0].id) is None, (
        "not in this scan"
    )
    assert await repository.cursor_of_notification("app", Search(), UUID(int=9)) is None
    assert await repository.cursor_of_notification("another", Search(), dead[0].id) is None


async def test_a_count_stops_at_its_bounds_and_reports_it(repository: NotificationSearch, rows: list[Row]) -> None:
    search = Search(states=(State.DEAD,))
    number = len(await all_of(repository, search))

    assert await repository.count("app", search, number) == Counted(number, True)
    assert await repository.count("app", search, number - 1) == Counted(number - 1, False)
    assert not (await repository.count("app", search, 1000, reads=1)).is_complete
    few = await repository.count("app", Search(error=("nothing",)), 1000, reads=10)
    assert few == Counted(0, False)
    assert await repository.count("app", Search(correlation_id="request-1"), 2) == Counted(2, False)


async def test_a_search_since_a_date_reads_no_older_dead_rows(repository: NotificationSearch, rows: list[Row]) -> None:
    dead, since = (State.DEAD, State.EXPIRED), at(18)
    ended = [row for row in rows if row.namespace == "app" and row.state in dead]
    by_name = Counter(row.handler_name for row in ended)
    recent = Counter(row.handler_name for row in ended if row.updated_date >= since)
    enough = max(recent.values()) + 1
    assert max(by_name.values()) > enough, "the rows before the date would be too many"

    counted = await repository.count("app", Search(states=dead, since=since), 1000, reads=enough * len(by_name))

    assert counted == Counted(recent.total(), True)


async def test_a_query_stops_after_bounded_rows_and_continues(
    repository: NotificationSearch, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query answered by an index alone has a higher limit."""
    monkeypatch.setattr(type(repository), "bounds", Bounds(rows=6, errors=3))
    ended = Search(states=(State.DEAD, State.EXPIRED))
    number = sum(matches(ended, row) for row in rows)

    assert await repository.count("app", ended, 1000) == Counted(number, True)
    assert len((await repository.find("app", ended, 1000)).rows) == number
    for search in (replace(ended, model_id="1"), replace(ended, error=("no",)), Search(model_id="1")):
        expected = sorted(str(row.id) for row in rows if matches(search, row))
        assert len(expected) > 3
        assert not (await repository.count("app", search, 1000)).is_complete
        assert await repository.count("app", search, 1000, reads=MANY) == Counted(len(expected), True)
        pages = await paged(repository, search, 1000, None)
        assert len(pages) > 2
        assert sorted(str(row.id) for page in pages for row in page) == expected


async def test_a_page_cursor_later_than_until_starts_at_until(repository: NotificationSearch, rows: list[Row]) -> None:
    search = Search(states=(State.DEAD, State.EXPIRED), until=at(10))
    expected = [row.id for row in await all_of(repository, search)]
    latest = (await all_of(repository, replace(search, until=None)))[0]
    assert latest.updated_date > at(10)

    page = await repository.find("app", search, 1000, await repository.cursor_of_notification("app", search, latest.id))

    assert [row.id for row in page.rows] == expected


@pytest.mark.parametrize("date", ["infinity", "-infinity", "0000-00-00 00:00:00.000000", "0001-01-01 00:00:00.000000"])
async def test_a_forged_cursor_raises_no_driver_error(outbox: Outbox, rows: list[Row], look: Look, date: str) -> None:
    """A date that only some databases support, and the largest numbers."""
    largest = str(2**63 - 1)
    places = {
        "DEAD": PageCursor("dead", "ledger", (date, str(UUID(int=1)), "0")),
        "PENDING": PageCursor("waiting", "ledger", (date, largest, largest)),
        "BLOCKED": PageCursor("blocked", "ledger", ("k" * 1000, largest, largest)),
        "SUCCEEDED": PageCursor("all", "k" * 1000, (str(UUID(int=1)), "k" * 1000, f"-{largest}")),
    }
    for state, position in places.items():
        filter = Filter(states=(state,))
        cursor = Cursor({"default": position}).text(filter)
        with suppress(ConfigurationError):
            await outbox.admin.list(filter, after=cursor)


async def test_the_last_errors_of_the_newest_matches_are_found(repository: NotificationSearch, rows: list[Row]) -> None:
    search = Search(states=(State.DEAD, State.FAILED))
    errors = [json.loads(row.errors) if row.errors != '"text"' else "" for row in rows]
    newest_errors = {
        row.id: entries[-1] for row, entries in zip(rows, errors, strict=True)
        if has_error((), row) and isinstance(entries, list)
    }  # fmt: skip
    expected = [
        (row.id, row.event_id, row.handler_name, row.updated_date, newest_errors[row.id]["type"],
         newest_errors[row.id]["message"])
        for row in await all_of(repository, search) if row.id in newest_errors
    ]  # fmt: skip

    found = await repository.last_errors("app", search, 1000)

    assert expected
    assert [(e.id, e.event_id, e.handler_name, e.updated_date, e.type, e.message) for e in found.rows] == expected
    assert found.next is None
    few = await repository.last_errors("app", search, 5)
    assert len(few.rows) <= 5
    assert few.next is not None


async def test_a_search_in_a_large_request_scans_by_state(
    repository: NotificationSearch, rows: list[Row], look: Look
) -> None:
    await insert(look, [EventRow(correlation_id="request-1") for _ in range(MAX_EVENTS)])

    for search in (Search(correlation_id="request-1"), Search(correlation_id="request-1", states=(State.DEAD,))):
        expected = sorted(str(row.id) for row in rows if matches(search, row))
        pages = await paged(repository, search, 4, MANY)
        assert sorted(str(row.id) for page in pages for row in page) == expected
        assert await repository.count("app", search, MANY) == Counted(len(expected), True)


async def test_a_page_read_before_the_request_grew_continues(
    repository: NotificationSearch, rows: list[Row], look: Look
) -> None:
    search = Search(correlation_id="request-2")
    first = await repository.find("app", search, 3)
    late = EventRow(correlation_id="request-2")
    await insert(look, [late])
    await insert(look, [Row(event_id=late.id, correlation_id="request-2")])

    assert first.next is not None
    rest = await repository.find("app", search, 1000, first.next)
    expected = sorted(str(row.id) for row in rows if matches(search, row))
    assert sorted(str(row.id) for row in (*first.rows, *rest.rows)) == expected
