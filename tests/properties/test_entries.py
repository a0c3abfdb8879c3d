"""Any input to a public call is accepted, or refused with a clear error and without a written row."""

from __future__ import annotations

import asyncio
import datetime as dt
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboxio import Action, Batch, Event, EventEnvelope, Outbox, OutboxError, Retry, Settings, Shard, Transaction
from outboxio.storage.schema import sql_files
from outboxio.testing import MovableClock, memory_outbox
from tests.kit.properties import SLOW, any_text, json_objects

pytestmark = pytest.mark.slow

START = dt.datetime(2030, 1, 1, 12)


class Noted(Event):
    text: Any = None


class Note(Action):
    text: Any = None

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Noted(self.text))


async def react(envelope: EventEnvelope[Any]) -> None: ...


# --- what is given -------------------------------------------------------------------------------------

zones = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)
times = st.datetimes() | st.datetimes(timezones=zones) | st.sampled_from([dt.datetime.min, dt.datetime.max])
ends = st.builds(
    lambda time, zone: time.replace(tzinfo=zone), st.sampled_from([dt.datetime.min, dt.datetime.max]), zones
)
numbers = st.integers() | st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400, 10**5000])
texts = any_text | st.sampled_from(["", " ", "\0", "\ud800", "x" * 256, "x" * 255, "a\nb", "DEAD", "noted", "default"])
single = (
    st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=9) | times | ends
    | st.dates() | st.timedeltas() | st.uuids() | st.decimals() | st.complex_numbers()
    | st.sampled_from([object(), object, Noted, Note, Event, Noted("x"), Note("x"), react, len, Ellipsis])
)  # fmt: skip
#: Anything that a caller may pass by mistake.
anything = (
    single | st.lists(single, max_size=3) | st.sets(texts, max_size=2) | json_objects(any_text) | st.tuples(single)
)


def some_of(**fitting: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a call: each is valid or an arbitrary value."""
    return st.fixed_dictionaries({name: st.just(value) | anything for name, value in fitting.items()})


# --- the entries ---------------------------------------------------------------------------------------


class Bench:
    """An in-memory outbox, and a user-supplied connection."""

    def __init__(self, outbox: Outbox, connection: sqlite3.Connection) -> None:
        self.outbox = outbox
        self.connection = connection

    async def transaction(self, **given: Any) -> None:
        async with self.outbox.transaction(**given):
            pass

    async def emit(self, event: Any, **given: Any) -> None:
        async with self.outbox.transaction("Emit") as tx:
            tx.emit(event, **given)

    async def record(self, event: Any, connection: Any, **given: Any) -> None:
        await self.outbox.record(self.connection if connection == "ours" else connection, event, **given)

    async def consume(self, message: Any, **given: Any) -> None:
        await self.outbox.inbox.consume(message, **given)

    async def rows(self) -> list[int]:
        """The number of all rows that a call might write."""
        tables = ("events", "event_notifications", "consumed_events", "pauses", "subscriptions")
        async with self.outbox.transaction("Count") as tx:
            found = [await tx.fetchval(f"SELECT count(*) FROM eventlog_{table}") for table in tables]
            raise Counted(found, self.connection.total_changes)


class Counted(Exception):
    pass


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(runner: asyncio.Runner) -> Iterator[Bench]:
    opened = memory_outbox(clock=MovableClock(START))
    outbox = runner.run(opened.__aenter__())
    outbox.handler(Noted, name="noted")(react)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for file in sql_files("sqlite"):
        connection.executescript(file.text)
    connection.execute("BEGIN")
    yield Bench(outbox, connection)
    connection.close()
    runner.run(opened.__aexit__(None, None, None))


MARKS = {"model_id": 1, "model_type": "Note", "ordering_key": "k", "topic": "notes", "available_at": START}
EXECUTION = {"shard": None, "correlation_id": "c", "headers": {"h": 1}}
CONTENT = {"event": None, "type": "Noted", "payload": {"text": 1}, "topic": None, "ordering_key": None,
           "headers": None, "correlation_id": None, "available_at": None}  # fmt: skip
ONE = UUID(int=1)

WRITES: dict[str, tuple[Callable[[Bench], Callable[..., Awaitable[object]]], dict[str, Any]]] = {
    "transaction": (lambda b: b.transaction, {"action_name": "Block", "params": {"a": 1}, **EXECUTION}),
    "emit": (lambda b: b.emit, {"event": Noted(1), **MARKS}),
    "execute": (lambda b: b.outbox.executor.execute, {"action": Note(1), "retry": (), **EXECUTION}),
    "record": (
        lambda b: b.record,
        {"event": Noted(1), "connection": "ours", "action": "Own", "params": None, **MARKS, **EXECUTION},
    ),
    "receive": (
        lambda b: b.outbox.inbox.receive,
        {"source": "s", "external_id": "1", "connection": None, "shard": None, **CONTENT},
    ),
    "consume": (
        lambda b: b.consume,
        {"message": None, "source": "s", "external_id": "2", "on_error": "store", "shard": None, **CONTENT},
    ),
}
ORDERS: dict[str, tuple[Callable[[Bench], Callable[..., Awaitable[object]]], dict[str, Any]]] = {
    "counts": (lambda b: b.outbox.admin.counts, {"shard": None}),
    "list": (
        lambda b: b.outbox.admin.list,
        {"state": "DEAD", "handler": "noted", "event_type": "Noted", "limit": 5, "shard": None},
    ),
    "inspect": (lambda b: b.outbox.admin.inspect, {"id": ONE, "shard": None}),
    "retry": (lambda b: b.outbox.admin.retry, {"ids": [ONE], "shard": None}),
    "skip": (lambda b: b.outbox.admin.skip, {"ids": [ONE], "shard": None}),
    "resume": (lambda b: b.outbox.admin.resume, {"handler": "noted", "ordering_key": "k", "shard": None}),
    "replay": (
        lambda b: b.outbox.admin.replay,
        {"handler": "noted", "since": START, "until": None, "types": None, "states": ["DEAD"], "shard": None},
    ),
    "pause": (lambda b: b.outbox.admin.pause, {"handler": "noted", "shard": None}),
    "unpause": (lambda b: b.outbox.admin.unpause, {"handler": "noted", "shard": None}),
    "paused": (lambda b: b.outbox.admin.paused, {"shard": None}),
    "purge": (lambda b: b.outbox.admin.purge, {"shard": None}),
    "backfill": (lambda b: b.outbox.admin.backfill, {"handler": "noted", "since": START, "types": None, "shard": None}),
    "unsubscribe": (lambda b: b.outbox.admin.unsubscribe, {"handler": "noted", "shard": None}),
    "payloads": (lambda b: b.outbox.admin.payloads, {"event_types": ["Noted"], "shard": None}),
}
ENTRIES = WRITES | ORDERS


@pytest.mark.parametrize("entry", ENTRIES)
@settings(max_examples=2 * SLOW)
@given(data=st.data())
def test_any_input_is_accepted_or_refused_before_writing(
    entry: str, data: st.DataObject, bench: Bench, runner: asyncio.Runner
) -> None:
    call, fitting = ENTRIES[entry]
    given_to_it = data.draw(some_of(**fitting))

    async def attempt() -> None:
        before = await counted(bench)
        try:
            await call(bench)(**given_to_it)
        except OutboxError as refusal:
            said = str(refusal)
            assert said
            said.encode("utf-8", "backslashreplace")
            assert await counted(bench) == before

    runner.run(attempt())


async def counted(bench: Bench) -> tuple[Any, ...]:
    try:
        await bench.rows()
    except Counted as counted:
        return counted.args
    raise AssertionError


# --- what is made of values ----------------------------------------------------------------------------

MADE: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "Outbox": (
        Outbox,
        {"database": "sqlite://", "namespace": "app", "settings": None, "clock": None, "redact": None, "on_dead": None},
    ),
    "running": (Outbox("sqlite://", namespace="app").running, {"fanout": True, "handling": True}),
    "Shard": (Shard, {"url": "sqlite://", "direct_url": None}),
    "Shard in an outbox": (
        lambda **given: Outbox({"a": Shard(**given)}, namespace="app"),
        {"url": "postgresql://localhost/app", "direct_url": "postgresql://localhost/app"},
    ),
    "shards": (lambda database: Outbox(database, namespace="app"), {"database": {"a": "sqlite://", "b": "sqlite://"}}),
    "Batch": (Batch, {"size": 5, "max_wait": None, "schedule": None}),
    "Retry": (Retry, {"on": ValueError, "attempts": 2, "delay": "1s"}),
    "MovableClock": (MovableClock, {"start": START}),
    "MovableClock.set": (lambda time: MovableClock(START).set(time), {"time": START}),
    "MovableClock.advance": (lambda delta: MovableClock(START).advance(delta), {"delta": "1s"}),
    "Settings": (
        Settings,
        {"concurrency": 5, "handling_batch_size": 5, "lock_heartbeat": "1s", "notify": True, "outcome_delay": 0},
    ),
    "Settings.load": (lambda source: Settings.load(source, environ=None), {"source": None}),
}


@pytest.mark.parametrize("made", MADE)
@given(data=st.data())
def test_objects_that_cannot_be_made_raise_outboxio_errors(made: str, data: st.DataObject) -> None:
    make, fitting = MADE[made]
    given_to_it = data.draw(some_of(**fitting))
    try:
        make(**given_to_it)
    except OutboxError as refusal:
        assert str(refusal)


@settings(max_examples=SLOW)
@given(anything)
def test_a_drain_timeout_is_a_duration_or_refused(timeout: object) -> None:
    async def attempt() -> None:
        async with memory_outbox() as outbox:
            try:
                await outbox.drain(timeout)  # type: ignore[arg-type]
            except OutboxError as refusal:
                assert str(refusal)

    asyncio.run(attempt())
