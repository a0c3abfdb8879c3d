"""The search for events, on every database: newest first, by cause, and with their notifications."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from uuid import UUID, uuid4

import msgspec
import pytest

from outboxio import Filter, Outbox
from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.storage.tables.event_search import EventSearch
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.rows import EventRow, Row, at, insert

ACTIONS = [UUID(int=number) for number in (1, 2, 3)]


@pytest.fixture
def repository(outbox: Outbox) -> EventSearch:
    repository: EventSearch = database_of(outbox).event_search
    return repository


def generated(chance: random.Random) -> Iterator[EventRow]:
    for number in range(80):
        yield EventRow(
            namespace="app" if number % 8 else "another", event_type=chance.choice(("A", "B", None)),
            ordering_key=chance.choice((None, "k")), model_id=chance.choice((None, "1")),
            action_name=chance.choice(("Deposit", "deposit")), action_id=chance.choice(ACTIONS),
            correlation_id=chance.choice((None, "request-1")), event_date=at(number),
        )  # fmt: skip


def searches(chance: random.Random) -> Iterator[Search]:
    yield Search()
    for _ in range(25):
        yield Search(
            states=chance.choice(((), (State.DEAD,))), names=chance.choice((None, ("nobody",))),
            event_types=chance.choice(((), (), ("A",))), ordering_key=chance.choice((None, None, "k")),
            model_id=chance.choice((None, None, "1")), action_name=chance.choice((None, None, "Deposit")),
            action_id=chance.choice((None, None, ACTIONS[0])),
            correlation_id=chance.choice((None, None, "request-1", "nobody's")),
            since=chance.choice((None, at(20))), until=chance.choice((None, at(60))), error=chance.choice(((), ("E",))),
        )  # fmt: skip


def matches(search: Search, event: EventRow) -> bool:
    return (
        event.namespace == "app"
        and (not search.event_types or event.event_type in search.event_types)
        and search.ordering_key in (None, event.ordering_key)
        and search.model_id in (None, event.model_id)
        and search.action_name in (None, event.action_name)
        and search.action_id in (None, event.action_id)
        and search.correlation_id in (None, event.correlation_id)
        and (search.since is None or event.event_date >= search.since)
        and (search.until is None or event.event_date < search.until)
    )


async def test_each_matching_event_is_on_one_page_newest_first(repository: EventSearch, look: Look) -> None:
    chance = random.Random(3)
    events = list(generated(chance))
    await insert(look, events)
    for search in searches(chance):
        expected = sorted((event.id for event in events if matches(search, event)), reverse=True)
        limit, most, after = chance.choice((1, 4, 100)), chance.choice((3, 1000)), None
        found: list[UUID] = []
        while True:
            page = await repository.newest("app", search, limit, after, most=most)
            assert len(page.rows) <= limit
            found += [event.id for event in page.rows]
            if page.next is None:
                break
            after = page.next
        assert found == expected, search


async def test_each_action_is_on_one_page_by_its_newest_event(repository: EventSearch, look: Look) -> None:
    chance = random.Random(5)
    actions = [UUID(int=number) for number in range(1, 30)]
    large = UUID(int=99)  # with more events than a list shows, between those of all other actions
    events = [
        EventRow(
            namespace="app" if number % 9 else "another", event_type=chance.choice(("A", "B")),
            action_id=large if chance.random() < 0.4 else chance.choice(actions[number // 8 : number // 8 + 4]),
            action_name="Deposit", event_date=at(number),
        )
        for number in range(200)
    ]  # fmt: skip
    await insert(look, events)
    cases = (Search(), Search(event_types=("A",)), Search(action_id=large), Search(action_id=actions[9]))
    for search in (*cases, Search(since=at(40), until=at(90)), Search(model_id="none")):
        matching = sorted((event for event in events if matches(search, event)), key=lambda e: e.id, reverse=True)
        expected = list(dict.fromkeys(event.action_id for event in matching))
        for limit, most in ((1, 1000), (4, 1000), (4, 15), (100, 1000)):
            after, found = None, []
            while True:
                page = await repository.newest_actions("app", search, limit, after, most=most)
                assert len(page.rows) <= limit
                found += page.rows
                if page.next is None:
                    break
                after = page.next
            assert [row.action_id for row in found] == expected, (search, limit, most)
            for row in found:
                of_action = [event for event in events if event.namespace == "app" and event.action_id == row.action_id]
                assert row.is_complete is (len(of_action) <= 20)
                assert len(row.events) == min(20, len(of_action))
                assert {event.id for event in row.events} <= {event.id for event in of_action}
                assert all((event.payload, event.headers) == (None, None) for event in row.events)


async def test_large_documents_are_left_out_on_request(repository: EventSearch, look: Look) -> None:
    cause = EventRow(payload='{"a": 1}', action_params='{"b": 2}', headers='{"c": 3}')
    child = EventRow(payload='{"a": 1}', action_params='{"b": 2}', headers='{"c": 3}', causation_id=cause.id)
    await insert(look, [cause, child])
    await insert(look, [Row(event_id=cause.id, payload='{"a": 1}', action_params='{"b": 2}', headers='{"c": 3}')])

    found = [
        *(await repository.newest("app", Search(), 10, documents=False)).rows,
        *await repository.events("app", [cause.id], documents=False),
        *await repository.caused_by("app", [cause.id], 10, documents=False),
    ]
    assert [(event.payload, bytes(event.action_params), event.headers) for event in found] == [
        (None, b"null", None)
    ] * 4
    [record] = await repository.notifications_of("app", [cause.id], 10)
    assert (record.payload, record.action_params, record.headers) == (None, {}, None)


async def test_the_states_of_events_are_counted(repository: EventSearch, look: Look) -> None:
    first, second, without = uuid4(), uuid4(), uuid4()
    states = ((first, "DEAD"), (first, "SUCCEEDED"), (first, "SUCCEEDED"), (second, "BLOCKED"))
    await insert(
        look, [Row(event_id=event, handler_name=f"h{i}", state=state) for i, (event, state) in enumerate(states)]
    )
    await insert(look, [Row(event_id=second, handler_name="other", namespace="another")])

    assert await repository.states_of("app", [first, second, without]) == {
        first: {"DEAD": 1, "SUCCEEDED": 2}, second: {"BLOCKED": 1},
    }  # fmt: skip
    assert await repository.states_of("app", []) == {}


async def test_a_summary_has_the_columns_of_the_event(repository: EventSearch, look: Look) -> None:
    cause = uuid4()
    event = EventRow(
        payload='{"amount": 12345678901234567890}', headers=None, action_params='{"a": [1]}', model_type="Wallet",
        model_id="7", topic="money", source="kafka", causation_id=cause, correlation_id="c", hops=2, delivered=False,
        available_at=at(9), ordering_key="k",
    )  # fmt: skip
    await insert(look, [event])

    [found] = await repository.events("app", [event.id, uuid4()])

    assert (found.id, found.event_type, found.model_type, found.model_id) == (event.id, "MoneyDeposited", "Wallet", "7")
    assert (found.topic, found.source, found.causation_id, found.correlation_id) == ("money", "kafka", cause, "c")
    assert (found.hops, found.delivered, found.available_at, found.ordering_key) == (2, False, at(9), "k")
    assert (found.event_date, found.headers, found.sequence) == (at(0), None, 1)
    assert found.payload is not None
    assert msgspec.json.decode(found.payload) == {"amount": 12345678901234567890}
    assert msgspec.json.decode(found.action_params) == {"a": [1]}
    assert await repository.events("another", [event.id]) == []
    assert await repository.events("app", []) == []


async def test_caused_events_come_in_sequence_order(repository: EventSearch, look: Look) -> None:
    first, second = EventRow(), EventRow()
    children = [EventRow(causation_id=(first if number % 2 else second).id) for number in range(8)]
    await insert(look, [first, second, *children, EventRow(causation_id=first.id, namespace="another"), EventRow()])

    found = await repository.caused_by("app", [first.id, second.id], 100)
    assert [event.id for event in found] == [child.id for child in children]
    assert len(await repository.caused_by("app", [first.id, second.id], 3)) == 3
    assert await repository.caused_by("app", [children[0].id], 100) == []
    assert await repository.caused_by("app", [], 100) == []


async def test_notifications_of_events_come_by_event_and_handler(repository: EventSearch, look: Look) -> None:
    rows = [Row(handler_name=name, event_id=event) for event in (uuid4(), uuid4(), uuid4()) for name in ("b", "a")]
    await insert(look, [*rows, rows[0].but(event_id=rows[0].event_id, namespace="another", handler_name="c")])
    events = [rows[0].event_id, rows[2].event_id]

    found = await repository.notifications_of("app", events, 100)

    expected = sorted((row for row in rows if row.event_id in events), key=lambda row: (row.event_id, row.handler_name))
    assert [row.id for row in found] == [row.id for row in expected]
    assert len(await repository.notifications_of("app", events, 3)) == 3
    assert await repository.notifications_of("app", [], 100) == []


async def test_operators_see_events_actions_and_exact_documents(
    make_outbox: Callable[..., Awaitable[Outbox]], look: Look
) -> None:
    outbox = await make_outbox(redact=lambda text: text.replace("4111", "****"))
    payload = '{"card": "4111", "big": 12345678901234567890, "total": 10.5}'
    cause = EventRow(payload=payload, action_id=ACTIONS[0], action_params='{"card": "4111"}', model_id="7")
    caused = EventRow(causation_id=cause.id, action_id=ACTIONS[1], payload=payload)
    idle = EventRow(action_id=ACTIONS[2], action_name="Look", event_type=None, payload=None, headers=None)
    await insert(look, [cause, caused, idle])
    rows = [Row(event_id=cause.id, handler_name=name, state=state, payload=payload)
            for name, state in (("a", "DEAD"), ("b", "SUCCEEDED"))]  # fmt: skip
    await insert(look, rows)
    admin = outbox.admin

    documents = await admin.documents(cause.id)
    assert {name: msgspec.json.decode(text) for name, text in documents.items()} == {
        "payload": {"card": "****", "big": 12345678901234567890, "total": 10.5},
        "action_params": {"card": "****"}, "headers": {},
    }  # fmt: skip
    assert (await admin.documents(idle.id)).keys() == {"action_params"}
    assert await admin.documents(uuid4()) == {}
    whole, part = await admin.event(cause.id), await admin.event(cause.id, documents=False)
    assert whole is not None
    assert part is not None
    assert (whole.payload, part.payload, part.action_params) == (msgspec.json.decode(documents["payload"]), None, {})
    assert await admin.event(uuid4()) is None
    assert await admin.states([cause.id, caused.id]) == {cause.id: {"DEAD": 1, "SUCCEEDED": 1}}
    assert [record.payload for record in await admin.inspect(cause.id, documents=False)] == [None, None]
    tree = await admin.tree(caused.id, documents=False)
    assert tree is not None
    assert [(node.event.id, node.event.payload, node.worst) for node in tree.root] == [
        (cause.id, None, State.DEAD), (caused.id, None, None),
    ]  # fmt: skip

    first = await admin.actions(limit=2)
    found = [*first, *await admin.actions(limit=2, after=first.next)]
    assert [(action.name, action.is_empty, action.worst) for action in found] == [
        ("Look", True, None), ("Deposit", False, None), ("Deposit", False, State.DEAD),
    ]  # fmt: skip
    assert (found[1].causation_id, found[2].events[0].model_id) == (cause.id, "7")
    assert [action.id for action in await admin.actions(Filter(model_id="7"))] == [ACTIONS[0]]
