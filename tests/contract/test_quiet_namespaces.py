"""A quiet namespace beside a busy one in the same tables: its lists are complete and show no other rows."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID

import pytest

from outboxio import Filter, Outbox
from outboxio.model.operating.operation import Page
from outboxio.storage.tables import event_search, scans
from outboxio.storage.tables.scans import Bounds
from outboxio.storage.tables.search import NotificationSearch
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.rows import EventRow, Row, insert

pytestmark = pytest.mark.slow

FIRST = 0x0190_0000_0000  # milliseconds in the first id
APART = 40_000  # milliseconds between the ids of two rows
OWN, FOREIGN = 6, 1500
SECRET = "handler-of-busy"

Read = Callable[[Filter, str | None], Awaitable[Page[object]]]


def id_at(number: int) -> UUID:
    """A UUIDv7; ``number`` is its place in time."""
    return UUID(int=(FIRST + number * APART) << 80 | 7 << 76 | 2 << 62 | (number + 1) * 0x1234_5678_9ABC)


@pytest.fixture
async def own(outbox: Outbox, look: Look) -> list[UUID]:
    """The ids of the events of namespace ``app``, newest first. Most rows of the other namespace are newer."""
    numbers = [0, 1, 2, 40, 41, OWN + FOREIGN - 400]
    names = ["app" if number in numbers else "busy" for number in range(OWN + FOREIGN)]
    both = [
        (
            EventRow(id=id_at(number), namespace=name, action_id=id_at(number), correlation_id="import"),
            Row(
                event_id=id_at(number), namespace=name, state="SUCCEEDED", action_id=id_at(number),
                handler_name="ledger" if name == "app" else SECRET, correlation_id="import",
            ),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    await insert(look, [event for event, _ in both])
    await insert(look, [row for _, row in both])
    return [id_at(number) for number in reversed(numbers)]


@pytest.fixture(params=["list", "events", "actions"])
def read(request: pytest.FixtureRequest, outbox: Outbox) -> Read:
    query = getattr(outbox.admin, request.param)
    return lambda filter, after: query(filter, 4, after)


async def pages(read: Read, filter: Filter) -> AsyncIterator[Page[object]]:
    after: str | None = None
    while True:
        page = await read(filter, after)
        yield page
        assert page.next is None or page.next != after, "each page continues after the previous one"
        if (after := page.next) is None:
            return


def events_in(page: Page[object]) -> list[UUID]:
    return [getattr(row, "event_id", None) or row.id for row in page]  # type: ignore[attr-defined]  # an event or action


def set_bounds(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, bounds: Bounds) -> None:
    search: NotificationSearch = database_of(outbox).search
    monkeypatch.setattr(type(search), "bounds", bounds)


def pass_few(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let a query skip only few rows of other namespaces, and a read even fewer."""
    set_bounds(outbox, monkeypatch, Bounds(rows=100, errors=50, skipped=most))
    for module in (scans, event_search):
        monkeypatch.setattr(module, "SKIPPED_AT_ONCE", most // 2)
        monkeypatch.setattr(module, "MAX_ROWS", most // 3)


FILTERS = [
    Filter(),
    Filter(event_type="MoneyDeposited"),
    Filter(states=("SUCCEEDED",)),
    Filter(correlation_id="import"),
]


async def test_a_busy_namespace_hides_nothing_of_a_quiet_one(
    outbox: Outbox, read: Read, own: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(outbox, monkeypatch, Bounds(rows=100, errors=50))
    for filter in FILTERS:
        first = await read(filter, None)
        assert events_in(first) == own[:4], filter
        assert first.next is not None
        assert events_in(await read(filter, first.next)) == own[4:], filter
        assert str(await outbox.admin.count(filter)) == str(OWN)


async def test_no_page_or_cursor_contains_data_of_another_namespace(
    outbox: Outbox, read: Read, own: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_few(outbox, monkeypatch, 70)
    for filter in FILTERS:
        found: list[UUID] = []
        cursors: list[str] = []
        async for page in pages(read, filter):
            found += events_in(page)
            cursors += [base64.urlsafe_b64decode(page.next + "==").decode()] if page.next else []
        assert found == own, filter
        assert cursors
        foreign = [str(id_at(number)) for number in range(OWN + FOREIGN) if id_at(number) not in own]
        assert [text for text in cursors if SECRET in text or any(id in text for id in foreign)] == []


async def test_a_page_ends_after_a_bounded_number_of_skipped_rows(
    outbox: Outbox, own: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_few(outbox, monkeypatch, 70)

    page = await outbox.admin.list(limit=4)
    count = await outbox.admin.count(most=5)

    assert len(page) == 0
    assert page.next is not None
    assert str(count) == "0+"


async def test_skipped_rows_of_one_minute_do_not_stop_a_list(
    outbox: Outbox, look: Look, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor has the minute of a skipped row, so a list continues until the minute has passed."""
    pass_few(outbox, monkeypatch, 10)
    ids = [UUID(int=id_at(0).int + (number << 4)) for number in range(100)]
    await insert(look, [EventRow(id=id, namespace="app" if id == ids[0] else "busy", action_id=id) for id in ids])
    await insert(look, [Row(event_id=id, namespace="app" if id == ids[0] else "busy", state="SUCCEEDED") for id in ids])

    found = [id async for page in pages(read, Filter()) for id in events_in(page)]

    assert found == ids[:1]


async def test_an_action_of_another_namespace_has_no_events(outbox: Outbox, look: Look, own: list[UUID]) -> None:
    foreign = id_at(100)

    for page in (await outbox.admin.list(Filter(action=foreign)), await outbox.admin.events(Filter(action=foreign))):
        assert (len(page), page.next) == (0, None)
    assert (await outbox.admin.actions(Filter(action=foreign))).next is None
    assert await outbox.admin.event(foreign) is None
    assert await outbox.admin.tree(foreign) is None
    assert await outbox.admin.inspect(foreign) == []
    assert await outbox.admin.states([foreign]) == {}
    assert await outbox.admin.documents(foreign) == {}
