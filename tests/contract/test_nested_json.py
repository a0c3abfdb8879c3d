"""Nested JSON: the same depth limit on every database; deeper JSON of other tools affects only its own row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Action, Event, EventEnvelope, InvalidEvent, Outbox, Received, Transaction
from outboxio.support.codec import MAX_DEPTH
from tests.kit.app import Journal, Look
from tests.kit.probes import written

TOO_DEEP = rf"is nested deeper than {MAX_DEPTH} objects and lists"

#: How deeply other tools may nest the JSON that they store, in these tests.
STORABLE = {"postgres": 3000, "sqlite": 3000, "mysql": 100, "mariadb": MAX_DEPTH}


class Doc(Event):
    inner: Any = None


class Nest(Action):
    inner: Any

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Doc())


def text_of(levels: int) -> str:
    """A JSON object with this many levels."""
    return '{"inner":' * levels + "1" + "}" * levels


def nested(levels: int) -> Any:
    """The same as a value of alternating objects and lists, built without recursion."""
    value: Any = 1
    for level in range(levels - 1):
        value = [value] if level % 2 else {"inner": value}
    return {"inner": value}


def entries(outbox: Outbox, levels: int) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every way to write JSON into the tables, with a document of this many levels."""
    deep = nested(levels)

    async def transact(**options: Any) -> None:
        async with outbox.transaction("Nest", **options) as tx:
            tx.emit(Doc())

    async def emit() -> None:
        async with outbox.transaction("Emit") as tx:
            tx.emit(Doc(deep["inner"]))

    def receive(way: Callable[..., Awaitable[object]], **content: Any) -> Callable[[], Awaitable[object]]:
        return lambda: way(source="s", external_id=f"{len(content)}-{way.__name__}", **content)

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "emit": emit,
        "params of a block": lambda: transact(params=deep),
        "params of an action": lambda: outbox.executor.execute(Nest(deep["inner"])),
        "headers": lambda: transact(headers=deep),
    }
    for name, way in (("receive", outbox.inbox.receive), ("consume", outbox.inbox.consume)):
        ways |= {
            f"{name} text": receive(way, type="Doc", payload=text_of(levels)),
            f"{name} bytes": receive(way, type="Doc", payload=text_of(levels).encode(), topic="t"),
            f"{name} a mapping": receive(way, type="Doc", payload=deep, topic="t", ordering_key="k"),
            f"{name} an event": receive(way, event=Doc(deep["inner"])),
            f"{name} headers": receive(way, event=Doc(), headers=deep),
        }
    return ways


async def taken(name: str, way: Callable[[], Awaitable[object]]) -> None:
    """Try an entry, and return its name if it accepted a document that it should refuse."""
    await way()
    pytest.fail(f"taken: {name}")


@pytest.mark.above_statements
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 2000])
async def test_json_nested_too_deeply_is_refused_at_every_entry(outbox: Outbox, look: Look, levels: int) -> None:
    outbox.handler(Doc, name="doc")(Journal())
    for name, way in entries(outbox, levels).items():
        if levels == 2000 and not name.endswith(("text", "bytes")):
            continue  # the encoder has its own error for this depth
        with pytest.raises(InvalidEvent, match=TOO_DEEP):
            await taken(name, way)
    assert await written(look) == []
    assert await look.notifications() == []


@pytest.mark.above_statements
async def test_a_value_that_overflows_the_encoder_is_refused_by_name(outbox: Outbox, look: Look) -> None:
    for name, way in entries(outbox, 50_000).items():
        with pytest.raises(InvalidEvent):
            await taken(name, way)
    assert await written(look) == []


@pytest.mark.above_statements
async def test_events_of_a_handler_have_the_same_depth_limit(outbox: Outbox) -> None:
    refused: list[str] = []

    @outbox.handler(Doc, name="chained")
    async def chained(envelope: EventEnvelope[Doc]) -> None:
        if envelope.event.inner is None:
            with pytest.raises(InvalidEvent, match=TOO_DEEP) as caught:
                envelope.emit(Doc(nested(MAX_DEPTH)))
            refused.append(caught.value.subject)

    async with outbox.transaction("Begin") as tx:
        tx.emit(Doc())
    assert (await outbox.drain()).succeeded == 1
    assert refused == ["event Doc"]


@pytest.mark.above_statements
async def test_record_refuses_deep_json_before_using_the_callers_transaction(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
        connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
        with connection:
            connection.execute("BEGIN")
            with pytest.raises(InvalidEvent, match=TOO_DEEP):
                await outbox.record(connection, Doc(nested(MAX_DEPTH)), action="Deep")
            assert connection.total_changes == 0
        connection.close()


async def test_json_of_the_maximum_depth_is_stored_on_every_database(outbox: Outbox, look: Look) -> None:
    journal = Journal(lambda envelope: ValueError() if envelope.event.inner == "fail" else None)
    outbox.handler(Doc, name="doc")(journal)

    for way in entries(outbox, MAX_DEPTH).values():
        await way()
    await outbox.drain()

    depths = {
        column: max(depth_of(row[column]) for row in await written(look))
        for column in ("payload", "action_params", "headers")
    }
    assert depths == dict.fromkeys(depths, MAX_DEPTH)
    received = [e for e in journal.envelopes if e.action_name == "inbox.receive" and e.event.inner is not None]
    assert {depth_of({"inner": envelope.event.inner}) for envelope in received} == {MAX_DEPTH}
    assert max(depth_of(envelope.headers) for envelope in journal.envelopes) == MAX_DEPTH
    assert max(depth_of(envelope.action_params) for envelope in journal.envelopes) == MAX_DEPTH
    assert max(depth_of(record.payload) for record in await outbox.admin.list()) == MAX_DEPTH


def depth_of(value: Any) -> int:
    if isinstance(value, str):
        return depth_of(json.loads(value)) if value.startswith("{") else 0
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


# --- deeper documents of other tools -------------------------------------------------------------------


@pytest.fixture
def deep(look: Look) -> str:
    """A document as deep as another tool can store in the test's database."""
    return text_of(STORABLE[look.dialect])


async def doc(outbox: Outbox, look: Look, number: int, **columns: str) -> None:
    """An event with this number, whose columns another tool changed before fan-out."""
    async with outbox.transaction("Store", {"number": number}) as tx:
        tx.emit(Doc(), model_id=number)
    for column, document in columns.items():
        await look.fetch(f"UPDATE {{events}} SET {column} = '{document}' WHERE model_id = '{number}'")


async def test_a_row_too_deep_to_decode_fails_alone(outbox: Outbox, look: Look, deep: str) -> None:
    for ordered in (False, True):
        outbox.handler(Doc, name=f"ordered-{ordered}", ordered=ordered)(Journal(looks_at_everything))
    for number, columns in enumerate(({}, {"payload": deep}, {"action_params": deep}, {"headers": deep}, {}), 1):
        await doc(outbox, look, number, **columns)

    await outbox.drain()

    states = {(record.handler_name, record.model_id): record.state for record in await outbox.admin.list()}
    assert len(states) == 10
    assert {states[name, number] for name, number in states if number in "15"} == {"SUCCEEDED"}
    # Newer Pythons decode deeper documents; what they cannot decode either is a failure of its row.
    assert set(states.values()) <= {"SUCCEEDED", "FAILED"}
    assert {record.attempts for record in await outbox.admin.list()} == {1}


def looks_at_everything(envelope: EventEnvelope[Any]) -> None:
    assert envelope.action_params is not None
    assert envelope.headers is not None


async def test_a_document_that_cannot_be_shown_affects_no_other(
    make_outbox: Callable[..., Awaitable[Outbox]], look: Look, deep: str
) -> None:
    outbox = await make_outbox()
    outbox.handler(Doc, name="doc")(Journal())
    for number, columns in enumerate(({}, {"payload": deep}, {"action_params": deep}, {"headers": deep}), 1):
        await doc(outbox, look, number, **columns)
    await outbox.drain()
    redacting = await make_outbox(redact=lambda text: text)

    for reader in (outbox, redacting):
        one, *others = reversed(await reader.admin.list())
        assert (one.payload, one.action_params, one.headers) == ({"inner": None}, {"number": 1}, None)
        for column, record in zip(("payload", "action_params", "headers"), others, strict=True):
            assert await reader.admin.inspect(record.id) == [record]
            log_text = getattr(record, column)
            if STORABLE[look.dialect] <= 100:
                assert log_text == json.loads(deep)
            else:
                shown = log_text["not shown"]
                assert f"the column {column} of this row is nested more than 100 levels deep" in shown


async def test_errors_that_cannot_be_shown_are_replaced_by_a_message(outbox: Outbox, look: Look, deep: str) -> None:
    outbox.handler(Doc, name="doc")(Journal())
    await doc(outbox, look, 1)
    await outbox.drain()
    await look.fetch(f"UPDATE {{event_notifications}} SET errors = '[{text_of(STORABLE[look.dialect] - 1)}]'")

    [record] = await outbox.admin.list()

    if STORABLE[look.dialect] > 100:
        assert "the column errors of this row is nested more than 100 levels deep" in str(record.errors[-1]["message"])
    else:
        assert len(record.errors) == 1


@pytest.mark.above_statements
async def test_a_refused_message_leaves_its_id_free(outbox: Outbox) -> None:
    with pytest.raises(InvalidEvent):
        await outbox.inbox.receive(source="s", external_id="1", type="Doc", payload=text_of(MAX_DEPTH + 1))
    received = await outbox.inbox.receive(source="s", external_id="1", type="Doc", payload=text_of(MAX_DEPTH))
    assert received is Received.RECEIVED
