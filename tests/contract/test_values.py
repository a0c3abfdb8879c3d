"""Stored values are read back unchanged: timestamps, texts in any alphabet, similar names. On every database.

A value that a database cannot store is refused with a clear error; see ``test_bad_input.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from outboxio import Event, EventEnvelope, Outbox, RetryAfter
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import MakeOutbox, written

MICROSECOND = timedelta(microseconds=1)

#: A name of the maximum length, of characters with four bytes each.
LONGEST = "\N{GRINNING FACE}" * 254
PAIR = (f"{LONGEST}\N{GRINNING FACE}", f"{LONGEST}\N{PILE OF POO}")

LOOK_ALIKES = ("evt_aB", "EVT_ab", "evt_àb", "evt_aB ")

#: Texts with a meaning in SQL, in LIKE, in JSON, or in a driver.
TRICKY = (
    r"back\slash \\ \n \' \" \0 \u0000",
    "it's 'quoted' \"twice\" `thrice` -- ; /* */ #",
    "100% %s %d %(name)s %% $1 ? :name {} {name}",
    "line\nreturn\rtab\tbell\x07escape\x1b delete\x7f \x1a",
    "\N{GRINNING FACE} \N{MUSICAL SYMBOL G CLEF} \U0010ffff",
    "e\N{COMBINING ACUTE ACCENT} is no \N{LATIN SMALL LETTER E WITH ACUTE}; \u202e \ufeff \ufffd \u2028",
    "null",
    " trailing and leading ",
    "",
)


class Noted(Event):
    text: str


def event_class(name: str) -> type[Event]:
    """An event class that is stored under this name."""
    kind = type(Event)("Named", (Noted,), {"__module__": __name__}, type_name=name)
    return cast("type[Event]", kind)


def stores_nul(outbox: Outbox) -> bool:
    return outbox.executor.shard(None).database.stores_nul


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("microsecond", [999_999, 1, 0])
async def test_timestamps_keep_their_microseconds(
    outbox: Outbox, clock: MovableClock, look: Look, microsecond: int
) -> None:
    started = datetime(2030, 1, 1, 23, 59, 59, microsecond)
    available, again = started + timedelta(seconds=1), started + timedelta(minutes=3)
    journal = Journal(lambda envelope: RetryAfter(at=again))
    outbox.handler(Noted, name="noted")(journal)
    clock.set(started)
    async with outbox.transaction("Note") as tx:
        tx.emit(Noted(""), available_at=available)
    clock.set(available)
    await outbox.drain()

    [row] = await written(look)
    assert [row[column] for column in ("started_date", "completion_date", "event_date")] == [started] * 3
    assert row["available_at"] == available
    [envelope] = journal.envelopes
    assert (envelope.event_date, envelope.started_date, envelope.completion_date) == (started,) * 3
    [record] = await outbox.admin.list()
    assert (record.created_date, record.retention_from, record.next_retry_at) == (available, available, again)
    assert record.updated_date == available


@pytest.mark.parametrize("microsecond", [999_999, 1, 0])
async def test_a_delayed_event_is_due_exactly_at_its_time(
    outbox: Outbox, clock: MovableClock, microsecond: int
) -> None:
    time = datetime(2031, 6, 30, 23, 59, 59, microsecond)
    journal = Journal()
    outbox.handler(Noted, name="noted")(journal)
    async with outbox.transaction("Note") as tx:
        tx.emit(Noted(""), available_at=time)
    clock.set(time - MICROSECOND)
    await outbox.drain()
    assert len(journal) == 0

    clock.set(time)
    await outbox.drain()
    assert len(journal) == 1


async def test_a_retry_is_due_exactly_at_its_time(outbox: Outbox, clock: MovableClock) -> None:
    again = clock.now() + timedelta(seconds=5, microseconds=999_999)
    journal = Journal(lambda envelope: RetryAfter(at=again) if envelope.attempt == 1 else None)
    outbox.handler(Noted, name="noted")(journal)
    async with outbox.transaction("Note") as tx:
        tx.emit(Noted(""))
    await outbox.drain()
    clock.set(again - MICROSECOND)
    await outbox.drain()
    assert len(journal) == 1

    clock.set(again)
    await outbox.drain()
    assert len(journal) == 2


async def test_due_rows_a_microsecond_apart_are_handled_in_order(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal()
    outbox.handler(Noted, name="noted", concurrency=1)(journal)
    first = clock.now()
    async with outbox.transaction("Note") as tx:
        for number in reversed(range(5)):
            tx.emit(Noted(str(number)), available_at=first + number * MICROSECOND + timedelta(seconds=1))
    clock.advance("1m")
    assert (await outbox.drain()).succeeded == 5
    # Fan-out dates rows that are already due by its own clock; then the sequence decides.
    assert sorted(envelope.event.text for envelope in journal.envelopes) == ["0", "1", "2", "3", "4"]


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TRICKY)
async def test_texts_survive_in_documents_and_columns(outbox: Outbox, look: Look, text: str) -> None:
    journal = Journal(lambda envelope: ValueError(text))
    outbox.handler(Noted, name="noted")(journal)
    document = {"value": text, f"key {text}": [text]}
    async with outbox.transaction("Note", document, headers=document, correlation_id=text) as tx:
        tx.emit(Noted(text), model_id=text, model_type=text, ordering_key=text)
    await outbox.drain()

    [envelope] = journal.envelopes
    assert envelope.event == Noted(text)
    assert (envelope.action_params, envelope.headers) == (document, document)
    assert (envelope.model_id, envelope.model_type, envelope.correlation_id) == (text, text, text)
    [row] = await written(look)
    assert (row["payload"], row["ordering_key"]) == ({"text": text}, text)
    [record] = await outbox.admin.list()
    assert (record.payload, record.action_params, record.headers) == ({"text": text}, document, document)
    assert record.errors[0]["message"] == text


async def test_nul_and_every_control_character_survive_inside_documents(outbox: Outbox) -> None:
    first = 0 if stores_nul(outbox) else 1
    text = "".join(map(chr, range(first, 32))) + "\x7f\x80\x9f"
    journal = Journal()
    outbox.handler(Noted, name="noted")(journal)
    async with outbox.transaction("Note", {"text": text}, headers={"text": text}) as tx:
        tx.emit(Noted(text))
    assert (await outbox.drain()).succeeded == 1

    [envelope] = journal.envelopes
    assert (envelope.event, envelope.action_params, envelope.headers) == (Noted(text), {"text": text}, {"text": text})
    [record] = await outbox.admin.list()
    assert (record.payload, record.action_params) == ({"text": text}, {"text": text})


async def test_texts_of_all_kinds_of_characters_survive_in_one_batch(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(Noted, name="noted")(journal)
    async with outbox.transaction("Note") as tx:
        for text in TRICKY:
            tx.emit(Noted(text), model_id=text)
    assert (await outbox.drain()).succeeded == len(TRICKY)
    assert sorted(envelope.event.text for envelope in journal.envelopes) == sorted(TRICKY)
    assert sorted(str(envelope.model_id) for envelope in journal.envelopes) == sorted(TRICKY)


# --- names ---------------------------------------------------------------------------------------

Names = tuple[str, ...]
of_every_kind = pytest.mark.parametrize("names", [PAIR, LOOK_ALIKES], ids=["longest", "look-alikes"])


@of_every_kind
async def test_handlers_with_similar_names_get_their_own_notifications(
    outbox: Outbox, look: Look, names: Names
) -> None:
    journals = {name: Journal(fails_as(name)) for name in names}
    for name, journal in journals.items():
        outbox.handler(MoneyDeposited, name=name)(journal)
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == len(names)

    assert [journal.amounts for journal in journals.values()] == [[1]] * len(names)
    for name in names:
        [record] = await outbox.admin.list(handler=name)
        assert (record.handler_name, record.errors[0]["message"]) == (name, name)
    assert (await outbox.admin.counts())["unroutable"] == 0
    assert len({row["name"] for row in await look.fetch("SELECT name FROM {leases}")}) == len(names) + 1
    assert await outbox.admin.unsubscribe(names[0]) == 1
    assert (await outbox.admin.counts())["unroutable"] == 1


def fails_as(name: str) -> Callable[[EventEnvelope[Any]], BaseException]:
    return lambda envelope: ValueError(name)


@of_every_kind
async def test_events_with_similar_type_names_go_to_their_own_handlers(outbox: Outbox, names: Names) -> None:
    classes = {name: event_class(name) for name in names}
    journals = {name: Journal() for name in names}
    for number, name in enumerate(names):
        outbox.handler(classes[name], name=f"handler {number}")(journals[name])
    async with outbox.transaction("Emit") as tx:
        for name in names:
            tx.emit(classes[name](name))  # type: ignore[call-arg]

    assert (await outbox.drain()).succeeded == len(names)

    for name, journal in journals.items():
        assert [(envelope.event_type, envelope.event.text) for envelope in journal.envelopes] == [(name, name)]
        assert [record.event_type for record in await outbox.admin.list(event_type=name)] == [name]
    assert await outbox.admin.payloads(names[:1]) != []
    assert len(await outbox.admin.payloads(names[:1])) == 1


@of_every_kind
async def test_topics_with_similar_names_go_to_their_own_handlers(outbox: Outbox, names: Names) -> None:
    journals = {name: Journal() for name in names}
    outbox.register(Noted)
    for number, (name, journal) in enumerate(journals.items()):
        outbox.handler(name=f"handler {number}", topic=name)(journal)
    async with outbox.transaction("Emit") as tx:
        for name in names:
            tx.emit(Noted(name), topic=name)

    assert (await outbox.drain()).succeeded == len(names)

    assert {name: [e.event.text for e in journal.envelopes] for name, journal in journals.items()} == {
        name: [name] for name in names
    }


@of_every_kind
async def test_namespaces_with_similar_names_are_independent(
    make_outbox: Callable[..., Awaitable[Outbox]], names: Names
) -> None:
    outboxes = [await make_outbox(name) for name in names]
    journals = [Journal() for _ in names]
    for outbox, journal in zip(outboxes, journals, strict=True):
        outbox.handler(Noted, name="noted")(journal)
        async with outbox.transaction("Emit") as tx:
            tx.emit(Noted(outbox.namespace))

    for outbox, journal in zip(outboxes, journals, strict=True):
        assert (await outbox.drain()).succeeded == 1
        assert [envelope.event.text for envelope in journal.envelopes] == [outbox.namespace]
        assert (await outbox.admin.counts())["SUCCEEDED"] == 1


@of_every_kind
async def test_similar_keys_and_ids_are_stored_unchanged(make_outbox: MakeOutbox, look: Look, names: Names) -> None:
    outbox = await make_outbox()
    for name in names:
        async with outbox.transaction("Emit", correlation_id=name) as tx:
            tx.emit(Noted(""), model_id=name, model_type=name, ordering_key=name, topic=name)

    rows = await written(look)

    for column in ("correlation_id", "model_id", "model_type", "ordering_key", "topic"):
        assert [row[column] for row in rows] == list(names)
        for name in names:
            assert await look.value(f"SELECT count(*) FROM {{events}} WHERE {column} = $1", name) == 1


async def test_an_action_with_the_longest_name_is_stored(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction(PAIR[0]):
        pass
    [row] = await written(look)
    assert row["action_name"] == PAIR[0]


async def test_a_renamed_handler_takes_over_only_its_own_rows(make_outbox: MakeOutbox) -> None:
    """Aliases are compared like names: a sibling that differs in its last character is unchanged."""
    old = await make_outbox()
    for name in PAIR:
        old.handler(Noted, name=name)(Journal(fails_as(name)))
    async with old.transaction("Emit") as tx:
        tx.emit(Noted(""))
    await old.drain()

    new = await make_outbox()
    renamed = Journal()
    new.handler(Noted, name="renamed", aliases={PAIR[0]})(renamed)
    [record] = await new.admin.list(handler=PAIR[0])
    await new.admin.retry([record.id])
    await new.drain()

    assert len(renamed) == 1
    assert [record.state for record in await new.admin.list(handler=PAIR[0])] == ["SUCCEEDED"]
    assert [record.state for record in await new.admin.list(handler=PAIR[1])] == ["FAILED"]
