"""PostgreSQL databases with an encoding of a few hundred characters: LATIN1, WIN1252."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from outboxio import ConfigurationError, Event, EventEnvelope, Filter, InvalidEvent, Job, Outbox, RetryPolicy
from outboxio.support.text import TextEncoding
from outboxio.sync import Producer

FOREIGN = "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{GRINNING FACE}"
ESCAPED = r"\u4e2d\U0001f600"
OWN = "\N{LATIN SMALL LETTER E WITH ACUTE}"

pytestmark = pytest.mark.parametrize("encoding", ["LATIN1", "WIN1252"])


class Noted(Event):
    text: str = ""
    things: dict[str, Any] | None = None


@asynccontextmanager
async def database(url: str, encoding: str) -> AsyncGenerator[str]:
    """The URL of an empty database with this encoding."""
    name = f"encoding_{uuid4().hex}"
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


@pytest.fixture
async def narrow(postgres_url: str, encoding: str) -> AsyncIterator[Outbox]:
    """An outbox on a database with a small character set."""
    async with database(postgres_url, encoding) as url, Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


async def url_of(outbox: Outbox) -> str:
    return str(outbox.executor.shard(None).database._url)  # type: ignore[attr-defined]  # a test of this dialect


ROWS = "SELECT (SELECT count(*) FROM eventlog.events) + (SELECT count(*) FROM eventlog.consumed_events)"

EMITTED = {
    "text": {"event": Noted(FOREIGN)},
    "things.a[0].b": {"event": Noted("", {"a": [{"b": FOREIGN}]})},
    "things key": {"event": Noted("", {FOREIGN: 1})},
    "ordering_key": {"ordering_key": FOREIGN},
    "model_id": {"model_id": FOREIGN},
    "model_type": {"model_id": 1, "model_type": FOREIGN},
    "topic": {"topic": FOREIGN},
}
ACTIONS: dict[str, dict[str, Any]] = {
    "params.p[0]": {"params": {"p": [FOREIGN]}},
    "headers.h": {"headers": {"h": FOREIGN}},
    "correlation_id": {"correlation_id": FOREIGN},
    "action_name": {"action_name": FOREIGN},
}
MESSAGES = {
    "source": {"source": FOREIGN},
    "external_id": {"external_id": FOREIGN},
    "text": {"payload": {"text": FOREIGN}},
    "event_type": {"type": FOREIGN},
    "headers.h": {"headers": {"h": FOREIGN}},
    "ordering_key": {"ordering_key": FOREIGN},
}


def refused(field: str, encoding: str) -> Any:
    return pytest.raises(InvalidEvent, match=rf"{field.replace('[', '.').replace(']', '.')} contains .* {encoding}$")


@pytest.mark.parametrize("field", EMITTED)
async def test_an_event_that_cannot_be_stored_is_refused_with_its_field(
    narrow: Outbox, encoding: str, field: str
) -> None:
    options = dict(EMITTED[field])
    event = options.pop("event", Noted())
    with refused(field, encoding):
        async with narrow.transaction("Note") as tx:
            tx.emit(event, **options)  # type: ignore[arg-type]
    connection = await asyncpg.connect(await url_of(narrow))
    try:
        with refused(field, encoding):
            async with connection.transaction():
                await narrow.record(connection, event, action="Note", **options)  # type: ignore[arg-type]
        assert await connection.fetchval(ROWS) == 0
    finally:
        await connection.close()
    with psycopg.connect(await url_of(narrow)) as blocking, refused(field, encoding):
        Producer("app").record(blocking, event, action="Note", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ACTIONS)
async def test_an_action_that_cannot_be_stored_is_refused_with_its_field(
    narrow: Outbox, encoding: str, field: str
) -> None:
    options: dict[str, Any] = {"action_name": "Note", **ACTIONS[field]}
    with refused(field, encoding):
        async with narrow.transaction(**options) as tx:
            tx.emit(Noted())


@pytest.mark.parametrize("field", MESSAGES)
async def test_a_message_that_cannot_be_stored_is_refused_with_its_field(
    narrow: Outbox, encoding: str, field: str
) -> None:
    message: dict[str, Any] = {"source": "s", "external_id": "1", "type": "Noted", "payload": {}, **MESSAGES[field]}

    @narrow.handler(Noted, name="plain")
    async def handle(envelope: EventEnvelope[Noted]) -> None: ...

    with refused(field, encoding):
        await narrow.inbox.receive(**message)
    if field in ("source", "external_id"):
        with refused(field, encoding):
            await narrow.inbox.consume(message)
    with refused(field, encoding):
        await narrow.inbox.receive_many([{**message, "external_id": message["external_id"] + "0"}])
    connection = await asyncpg.connect(await url_of(narrow))
    try:
        assert await connection.fetchval(ROWS) == 0
    finally:
        await connection.close()


async def test_characters_in_the_encoding_are_stored(narrow: Outbox, encoding: str) -> None:
    seen: list[EventEnvelope[Noted]] = []

    @narrow.handler(Noted, name=OWN)
    async def handle(envelope: EventEnvelope[Noted]) -> None:
        seen.append(envelope)

    async with narrow.transaction(OWN, {OWN: OWN}, headers={OWN: OWN}) as tx:
        tx.emit(Noted(OWN), ordering_key=OWN)
    await narrow.drain()

    [envelope] = seen
    assert (envelope.event.text, envelope.action_params, envelope.headers) == (OWN, {OWN: OWN}, {OWN: OWN})


async def test_a_handlers_error_is_stored_with_escape_sequences(narrow: Outbox, encoding: str) -> None:
    @narrow.handler(Noted, name="failing", retry=RetryPolicy(max_attempts=1))
    async def fail(envelope: EventEnvelope[Noted]) -> None:
        raise ValueError(f'{OWN} {FOREIGN} "\\')

    async with narrow.transaction("Note") as tx:
        tx.emit(Noted())
    await narrow.drain()
    await narrow.inbox.consume(source="s", external_id="1", type="Noted", payload={}, on_error="store")

    records = await narrow.admin.list()
    assert [record.errors[0]["message"] for record in records] == [f'{OWN} {ESCAPED} "\\'] * 2
    assert [record.state for record in records] == ["DEAD", "DEAD"]


async def test_a_handler_whose_event_cannot_be_stored_fails_alone(
    narrow: Outbox, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    @narrow.handler(Noted, name="emitting", retry=RetryPolicy(max_attempts=1))
    async def emit(envelope: EventEnvelope[Noted]) -> None:
        if envelope.event.text == "":
            envelope.emit(Noted(FOREIGN if envelope.model_id == "1" else "second"))

    async with narrow.transaction("Note") as tx:
        for number in range(3):
            tx.emit(Noted(), model_id=number)
    drained = await narrow.drain()

    assert (drained.succeeded, drained.dead) == (4, 1)
    assert f"text has a character that the encoding {encoding} lacks" in caplog.text


async def test_a_failed_job_is_recorded_at_once_and_retried(narrow: Outbox, encoding: str) -> None:
    second = asyncio.Event()

    @narrow.job("tick", every=timedelta(seconds=1), retry=RetryPolicy(max_attempts=2, base="1ms", jitter=0))
    async def tick(job: Job) -> None:
        if job.attempt == 2:
            second.set()
        raise ValueError(FOREIGN)

    async with narrow.running():
        async with asyncio.timeout(20):
            await second.wait()
    [row] = await narrow.admin.jobs()
    assert (row.result, row.error is not None and ESCAPED in row.error) == ("FAILED", True)


async def test_operations_are_refused_with_the_field_that_cannot_be_stored(narrow: Outbox, encoding: str) -> None:
    @narrow.handler(Noted, name="plain")
    async def handle(envelope: EventEnvelope[Noted]) -> None: ...

    await narrow.drain()
    admin = narrow.admin
    for field in ("actor", "reason"):
        with pytest.raises(ConfigurationError, match=f"^{field} contains .* {encoding}"):
            await admin.pause("plain", **{field: FOREIGN})
    assert await admin.paused() == set()
    assert await admin.operations() == []
    for read in (lambda: admin.list(handler=FOREIGN), lambda: admin.count(Filter(error=FOREIGN))):
        with pytest.raises(ConfigurationError, match=f"{FOREIGN}.* contains .* {encoding}"):
            await read()


async def test_handler_names_that_cannot_be_stored_are_refused_at_startup(narrow: Outbox, encoding: str) -> None:
    @narrow.handler(Noted, name=FOREIGN)
    async def handle(envelope: EventEnvelope[Noted]) -> None: ...

    with pytest.raises(ConfigurationError, match=f"{FOREIGN}.* contains .* {encoding}"):
        async with narrow.running():
            pass


def test_only_missing_characters_become_escape_sequences(encoding: str) -> None:
    one = TextEncoding(encoding, {"LATIN1": "latin1", "WIN1252": "cp1252"}[encoding])
    assert one.escaped(f"{OWN}\\{FOREIGN}\ud800") == f"{OWN}\\{ESCAPED}\\ud800"
    assert one.escaped_in_json(f'["{OWN}{FOREIGN}"]') == rf'["{OWN}\\u4e2d\\U0001f600"]'
    assert one.lacking(f"{OWN}{FOREIGN}") == FOREIGN[0]
    assert TextEncoding().escaped(FOREIGN) == FOREIGN
