"""User-supplied pools whose connections convert values: codecs of asyncpg, converters of aiomysql."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import aiomysql  # pyright: ignore[reportMissingTypeStubs]  # the driver has no types
import asyncpg
import pymysql
import pytest
from pymysql.constants import FIELD_TYPE
from pymysql.converters import conversions
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from outboxio import (
    Batch,
    ConfigurationError,
    Event,
    EventEnvelope,
    InvalidEvent,
    Job,
    Outbox,
    RetryPolicy,
    Transaction,
)
from outboxio.sync import Producer
from tests.kit import mysql
from tests.kit.app import Look
from tests.kit.logged_problems import logged_problems

CONVERTERS = {**conversions, FIELD_TYPE.JSON: json.loads, FIELD_TYPE.DATETIME: str, FIELD_TYPE.LONGLONG: str}


class Noted(Event):
    number: int
    things: dict[str, Any] | None = None


async def decode_json(connection: asyncpg.Connection[Any]) -> None:
    for name in ("json", "jsonb"):
        await connection.set_type_codec(name, schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    await connection.set_type_codec("numeric", schema="pg_catalog", encoder=str, decoder="{} EUR".format)


def converting_pool(look: Look) -> AbstractAsyncContextManager[Any]:
    """A pool that decodes JSON, as many applications have, and converts a few other types."""
    if look.driver == "asyncpg":
        return asyncpg.create_pool(look.url, min_size=0, max_size=20, init=decode_json)
    return mysql.pool(look.url, minsize=0, maxsize=20, conv=CONVERTERS)  # type: ignore[no-any-return]  # the driver has no types


class Seen:
    """The numbers handled so far, by handler name."""

    def __init__(self, *names: str) -> None:
        self._numbers: dict[str, set[int]] = {name: set() for name in names}
        self._changed = asyncio.Event()

    def add(self, name: str, number: int) -> None:
        self._numbers[name].add(number)
        self._changed.set()

    async def all_have(self, numbers: set[int]) -> None:
        async with asyncio.timeout(30):
            while any(found < numbers for found in self._numbers.values()):
                self._changed.clear()
                await self._changed.wait()


def with_every_feature(outbox: Outbox) -> Seen:
    """Handlers of each kind, and jobs."""
    seen = Seen("plain", "ordered", "batch", "transactional", "once", "part", "failing", "job", "job in transaction")

    for name, options in {
        "plain": {},
        "ordered": {"ordered": True},
        "transactional": {"delivery": "transactional"},
        "once": {"delivery": "at_most_once"},
        "part": {"partitions": 4, "ordered": True},
    }.items():

        async def handle(envelope: EventEnvelope[Noted], name: str = name) -> None:
            assert envelope.event.things == {"a": [1, None, {"b": "ü"}]}
            assert (envelope.action_params, envelope.headers) == ({"p": [1]}, {"h": 1})
            seen.add(name, envelope.event.number)

        outbox.handler(Noted, name=name, aliases={f"old {name}"}, **options)(handle)  # type: ignore[call-overload]

    @outbox.handler(Noted, name="batch", batch=Batch(size=10))
    async def handle_all(envelopes: list[EventEnvelope[Noted]]) -> None:
        for envelope in envelopes:
            seen.add("batch", envelope.event.number)

    @outbox.handler(Noted, name="failing", retry=RetryPolicy(max_attempts=2, base="1ms", jitter=0))
    async def fail(envelope: EventEnvelope[Noted]) -> None:
        if envelope.attempt == 2:
            seen.add("failing", envelope.event.number)
        raise ValueError("no")

    @outbox.job("job", every=timedelta(seconds=1))
    async def job() -> None:
        for number in range(3):
            seen.add("job", number)

    @outbox.job("job in transaction", every=timedelta(seconds=1))
    async def job_in_transaction(job: Job, tx: Transaction) -> None:
        for number in range(3):
            seen.add("job in transaction", number)

    return seen


async def use_every_feature(outbox: Outbox, seen: Seen) -> None:
    """Handle events and inbox messages, run jobs, and read and change rows as an operator."""
    payload = {"number": 2, "things": {"a": [1, None, {"b": "ü"}]}}
    async with outbox.running():
        for number in range(2):
            async with outbox.transaction("Note", {"p": [1]}, headers={"h": 1}) as tx:
                tx.emit(Noted(number, payload["things"]), ordering_key="k")  # type: ignore[arg-type]
        async with outbox.transaction("Note", {"p": [1]}, headers={"h": 1}) as tx:
            tx.emit(Noted(2, payload["things"]), ordering_key="k")  # type: ignore[arg-type]
        await seen.all_have({0, 1, 2})
        async with outbox.lock("k", timeout=5):
            pass
        admin = outbox.admin
        await admin.pause("plain", reason="a reason")
        await admin.unpause("plain")
        await admin.partitions("part", 2)
        await admin.run_job_now("job")
        dead = await admin.list(handler="failing", state="DEAD")
        if dead:
            await admin.retry([dead[0].id])
        for read in (
            admin.actions, admin.count, admin.counts, admin.events, admin.groups, admin.handlers,
            admin.instances, admin.jobs, admin.keys, admin.list, admin.locks, admin.operations, admin.overview,
            admin.partitions, admin.paused, admin.stranded, admin.purge, outbox.health, partial(admin.history, "plain"),
        ):  # fmt: skip
            await read()


def problems_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in logged_problems(caplog) if "handler 'failing' failed" not in text]


@pytest.mark.one_of_family
@pytest.mark.with_tables
async def test_every_feature_works_over_connections_that_decode_json(
    server_url: str, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async with converting_pool(look) as pool, Outbox(pool, namespace="app") as outbox:
        await outbox.migrate()
        await use_every_feature(outbox, with_every_feature(outbox))
    assert problems_in(caplog) == []


@pytest.mark.one_of_family
async def test_every_feature_works_over_an_engine_that_decodes_json(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.run_async(decode_json)

    async with Outbox(engine, namespace="app") as outbox:
        await outbox.migrate()
        await use_every_feature(outbox, with_every_feature(outbox))
    await engine.dispose()
    assert problems_in(caplog) == []


@pytest.mark.one_of_family
@pytest.mark.with_tables
async def test_a_message_is_received_over_connections_that_decode_json(server_url: str, look: Look) -> None:
    async with converting_pool(look) as pool, Outbox(pool, namespace="app") as outbox:
        await outbox.migrate()
        given = {"source": "s", "external_id": "1", "type": "Noted", "payload": {"number": 1}}
        seen: list[int] = []

        @outbox.handler(Noted, name="plain")
        async def handle(envelope: EventEnvelope[Noted]) -> None:
            seen.append(envelope.event.number)

        assert [await outbox.inbox.receive(**given), await outbox.inbox.receive(**given)] == ["RECEIVED", "DUPLICATE"]  # type: ignore[arg-type]
        assert await outbox.inbox.receive_many([given]) == ["DUPLICATE"]
        assert (await outbox.inbox.consume({**given, "external_id": "2"})).succeeded == ("plain",)
        assert (await outbox.drain()).succeeded == 1
        assert seen == [1, 1]


@pytest.mark.parametrize("of_type", ["uuid", "timestamp", "int8"])
@pytest.mark.parametrize("source", ["pool", "engine"])
async def test_codecs_that_change_stored_values_are_refused_by_name(
    postgres_url: str, of_type: str, source: str
) -> None:
    async def as_text(connection: asyncpg.Connection[Any]) -> None:
        await connection.set_type_codec(of_type, schema="pg_catalog", encoder=str, decoder=str)

    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.run_async(as_text)

    async with (
        asyncpg.create_pool(postgres_url, min_size=0, max_size=10, init=as_text) as pool,
        Outbox(pool if source == "pool" else engine, namespace="app") as outbox,
    ):
        outbox.register(Noted)
        with pytest.raises(ConfigurationError, match=rf"codecs for {of_type} \(set_type_codec\)"):
            async with outbox.running():
                pass
    await engine.dispose()


@pytest.mark.parametrize("names", ["'5'", "'\"x\"'", "'{}'", "'[1]'", '\'"[\\"part\\"]"\''])
async def test_a_malformed_row_of_one_process_stops_no_other(
    outbox: Outbox, look: Look, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    if look.is_file:
        return  # SQLite has no partitions
    seen = Seen("part")

    @outbox.handler(Noted, name="part", partitions=2)
    async def handle(envelope: EventEnvelope[Noted]) -> None:
        seen.add("part", envelope.event.number)

    names = names.replace("\\", "\\\\") if look.driver == "aiomysql" else names
    await look.fetch(
        "INSERT INTO {instances} (namespace, instance, names, started_date, last_seen_date) "
        f"VALUES ('app', 'other', {names}, '2026-01-01', '2099-01-01')"
    )
    async with outbox.running():
        async with outbox.transaction("Note") as tx:
            tx.emit(Noted(1))
        if "part" not in names:  # otherwise the other process takes its share and keeps it
            await seen.all_have({1})
        assert await outbox.admin.instances()
    assert not [record for record in caplog.records if "is tried again" in record.getMessage()]


@pytest.mark.parametrize("charset", ["latin1", "utf8mb3"])
@pytest.mark.with_tables
async def test_a_lossy_character_set_is_refused(mysql_url: str, charset: str) -> None:
    driver: Any = aiomysql
    options = {**mysql.address(mysql_url), "charset": charset}
    connection = await driver.connect(**options)
    async with (
        driver.create_pool(**options, minsize=0, maxsize=10) as pool,
        Outbox(pool, namespace="app") as outbox,
    ):
        outbox.register(Noted)
        given = {"source": "s", "external_id": "1", "type": "Noted", "payload": {"number": 1}}

        async def emit() -> None:
            async with outbox.transaction("Note") as tx:
                tx.emit(Noted(1))

        async def run() -> None:
            async with outbox.running():
                pass

        await connection.begin()
        for use in (
            emit, run, outbox.admin.counts, partial(outbox.inbox.receive, **given),  # type: ignore[arg-type]
            partial(outbox.inbox.receive_many, [given]),
            partial(outbox.record, connection, Noted(1), action="Note"),
        ):  # fmt: skip
            with pytest.raises(ConfigurationError, match=f"character set {charset},"):
                await use()
    await connection.ensure_closed()
    await asyncio.sleep(0)  # the socket is closed in the next turn of the event loop


@pytest.mark.parametrize(("charset", "text"), [("latin1", "中"), ("utf8mb3", "\N{GRINNING FACE}")])
@pytest.mark.with_tables
def test_a_producer_names_the_field_that_does_not_fit_its_charset(mysql_url: str, charset: str, text: str) -> None:
    options = {name: value for name, value in mysql.address(mysql_url).items() if name not in ("db", "charset")}
    connection = pymysql.connect(**options, charset=charset)
    producer = Producer("app")
    with connection, connection.cursor() as cursor:
        with pytest.raises(InvalidEvent, match=f"things.a contains .* its encoding is {charset}$"):
            producer.record(connection, Noted(1, {"a": text}), action="Note")
        producer.record(connection, Noted(1, {"a": "é"}), action="Note", model_id="é")
        cursor.execute("SELECT model_id FROM eventlog.events")
        assert cursor.fetchall() == (("é",),)
