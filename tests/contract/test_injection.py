"""Data stays data: no name, key, id or text becomes part of a statement or the name of code."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Event, EventEnvelope, InvalidEvent, Outbox
from tests.kit.app import Journal, Look, MoneyDeposited

MakeOutbox = Callable[..., Awaitable[Outbox]]

HOSTILE = [
    "'; DROP TABLE events; --",
    "\\'; DROP TABLE events; --",
    '"; DROP TABLE events; --',
    "x' OR '1'='1",
    "%s %(ids)s {ids} {0} $1 :namespace ?",
    "a\\",
    "`a`/*b*/#c",
    "\N{FULLWIDTH APOSTROPHE}\N{MODIFIER LETTER APOSTROPHE}'",
    "\x1a\x08\n\r\t",
]


@pytest.mark.parametrize("text", HOSTILE)
async def test_text_that_looks_like_sql_is_stored_and_found_unchanged(
    make_outbox: MakeOutbox, look: Look, text: str
) -> None:
    class Hostile(Event, type_name=text, aliases={f"{text}!"}):
        content: str

    failing = [True]

    async def handle(envelope: EventEnvelope[Any]) -> None:
        seen.append(envelope)
        if failing:
            raise ValueError(text)

    seen: list[EventEnvelope[Any]] = []
    outbox = await make_outbox(text)
    outbox.handler(Hostile, name=text, aliases={f"{text}!"}, ordered=True)(handle)
    outbox.handler(name=f"{text}?", topic=text)(Journal())
    async with outbox.transaction(text, {text: text}, correlation_id=text, headers={text: text}) as tx:
        tx.emit(Hostile(text), model_id=text, model_type=text, ordering_key=text, topic=text)
    await outbox.drain()

    admin = outbox.admin
    [record] = await admin.list(state="FAILED", handler=text, event_type=text)
    assert (record.model_id, record.ordering_key, record.correlation_id, record.namespace) == (text, text, text, text)
    assert (record.payload, record.action_params, record.headers) == ({"content": text}, {text: text}, {text: text})
    assert record.errors[0]["message"] == text
    failing.clear()
    assert (await admin.retry([record.id])).done == 1
    await admin.pause(text)
    assert await admin.paused() == {text}
    assert await admin.unpause(text)
    await outbox.drain()
    [envelope] = seen[1:]
    assert (envelope.event, envelope.headers, envelope.correlation_id) == (Hostile(text), {text: text}, text)
    assert await admin.replay(text, since=record.event_date, types=[text]) == 1
    assert await admin.resume(text, text) == 0
    assert await admin.backfill(f"{text}?", since=record.event_date, types=[text]) == 0
    assert await admin.unsubscribe(text) == 2
    received = {"source": text, "external_id": text, "type": text, "payload": {text: text}}
    assert [await outbox.inbox.receive(**received) for _ in range(2)] == ["RECEIVED", "DUPLICATE"]
    assert len(await look.events()) == 2


@pytest.mark.above_statements
async def test_an_invalid_id_is_refused_by_name(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError()))
    async with outbox.transaction("Deposit") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
    await outbox.drain()
    admin = outbox.admin

    wrong: list[Any] = ["", "1", "' OR '1'='1", "') OR 1 = 1 -- ", 7, None, b"x" * 16]
    for id in wrong:
        for operation in (admin.retry([id]), admin.skip([id]), admin.inspect(id)):
            with pytest.raises(
                ConfigurationError, match="is not the id of a notification or an event; expected a UUID"
            ):
                await operation
    assert await look.states() == {"FAILED": 1}


@pytest.mark.above_statements
async def test_an_id_may_be_passed_as_text(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError()))
    async with outbox.transaction("Deposit") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
    await outbox.drain()
    [record] = await outbox.admin.list()
    as_text: Any = str(record.id)

    assert list(await outbox.admin.inspect(as_text)) == [record]
    assert [(await outbox.admin.retry([as_text])).done, (await outbox.admin.skip([as_text])).done] == [1, 1]


#: A module that is not imported yet, and a class, a function and a variable of it.
UNUSED = "this"
ASSERTED = [UNUSED, f"{UNUSED}:s", "os.system", "tests.kit.app.MoneyDeposited"]


@pytest.mark.above_statements
@pytest.mark.parametrize("type", ASSERTED)
async def test_a_type_that_names_code_is_never_imported(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    monkeypatch.delitem(sys.modules, UNUSED, raising=False)
    before = set(sys.modules)
    feed, first = Journal(), Journal()
    outbox.handler(name="feed", topic="news")(feed)
    outbox.handler(MoneyDeposited, name="first")(first)
    payload = {"wallet_id": str(uuid4()), "amount": "1", "__class__": type, "py/object": type, "type": type}

    await outbox.inbox.receive(source="evil", external_id="1", type=type, payload=payload, topic="news")
    await outbox.inbox.receive(source="evil", external_id="2", type="MoneyDeposited", payload=payload)
    await look.fetch("UPDATE {events} SET payload = payload")
    await outbox.drain()

    assert set(sys.modules) - before <= {name for name in sys.modules if name.startswith(("asyncpg", "aiomysql"))}
    assert UNUSED not in sys.modules
    assert [envelope.event for envelope in feed.envelopes] == [payload]  # a plain mapping
    assert [envelope.event.__class__ for envelope in first.envelopes] == [MoneyDeposited]


@pytest.mark.above_statements
async def test_a_row_with_a_changed_type_is_an_ordinary_failure(outbox: Outbox, look: Look) -> None:
    """A writer of the table can choose among the registered types, and nothing else."""
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with outbox.transaction("Deposit") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
    await outbox.drain()
    await look.fetch("UPDATE {event_notifications} SET event_type = 'tests.kit.app.WalletOpened', state = 'PENDING'")

    assert (await outbox.drain()).failed == 1

    [record] = await outbox.admin.list()
    assert "no event class of handler 'first' has this name" in str(record.errors[-1]["message"])
    assert len(journal) == 1


@pytest.mark.above_statements
async def test_a_payload_that_is_not_json_is_refused_and_not_evaluated(outbox: Outbox) -> None:
    for payload in ("__import__('os')", b"\x80\x04\x95", "!!python/object/apply:os.system ['true']"):
        with pytest.raises(InvalidEvent):
            await outbox.inbox.receive(source="evil", external_id="1", type="MoneyDeposited", payload=payload)
