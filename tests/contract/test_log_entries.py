"""Log records about handlers, rows and messages are single lines without payload values."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Batch, Event, EventEnvelope, Outbox, RetryPolicy, Settings
from tests.kit.app import Emit, Journal, Look, MoneyDeposited

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

CARD = "4111111111111111"
FORGED = "\n2030-01-01 ERROR outboxio forged\u2028\x1b[2Jgone"


class Kind(enum.Enum):
    A = "a"


class Paid(Event):
    kind: Kind


class Validation(Exception):
    def __repr__(self) -> str:
        return f"2 errors{FORGED}"

    __str__ = __repr__


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("outboxio")]


def are_lines(entries: list[str]) -> bool:
    return bool(entries) and all(entry.isprintable() for entry in entries)


async def test_an_undecodable_payload_is_stored_but_not_logged(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    outbox.handler(Paid, name="paid")(Journal())
    outbox.handler(Paid, name="many", batch=Batch(size=2))(Journal())
    await outbox.inbox.receive(source="s", external_id="1", type="Paid", payload={"kind": CARD})

    assert (await outbox.drain()).failed == 2

    entries = logged(caplog)
    assert not any(CARD in entry for entry in entries)
    assert sum("Invalid enum value - at `$.kind`" in entry for entry in entries) == 2
    assert all(CARD in str(record.errors[0]["message"]) for record in await outbox.admin.list())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": Batch(size=2)},
        {"delivery": "transactional"},
        {"delivery": "at_most_once"},
        {"retry": RetryPolicy(backoff=lambda attempts, error: (_ for _ in ()).throw(Validation()))},
    ],
    ids=str,
)
async def test_a_multiline_error_is_one_log_line(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.DEBUG)

    async def handler(given: Any) -> None:
        raise Validation

    outbox.handler(MoneyDeposited, name="first", **options)(handler)
    await outbox.executor.execute(Emit((1, 2, 3)))

    await outbox.drain()

    assert are_lines(logged(caplog))
    assert any("forged" in entry for entry in logged(caplog))


async def test_a_name_from_outside_is_one_log_line(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(envelope: EventEnvelope[Any]) -> None:
        raise LookupError(envelope.event_type)

    caplog.set_level(logging.DEBUG)
    outbox.handler(name="news", topic="news")(handler)
    message = {"source": "s", "type": f"Odd{FORGED}", "payload": {}, "topic": "news"}
    await outbox.inbox.receive(external_id="1", **message)  # type: ignore[arg-type]  # it is a message's parts
    await outbox.inbox.receive(external_id="2", correlation_id="2", **message)  # type: ignore[arg-type]  # it is a message's parts
    await look.fetch("UPDATE {events} SET payload = NULL WHERE correlation_id = '2'")

    assert (await outbox.drain()).failed == 2

    assert are_lines(logged(caplog))
    assert sum("forged" in entry for entry in logged(caplog)) == 2


async def test_a_name_of_the_application_is_one_log_line(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    outbox = await make_outbox(namespace=f"shop{FORGED}"[:60])
    outbox.handler(MoneyDeposited, name=f"first{FORGED}")(Journal(lambda envelope: ValueError("no")))
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()

    assert are_lines(logged(caplog))


async def test_the_position_of_a_stuck_handler_is_one_log_line(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()

    async def stubborn(envelope: EventEnvelope[Any]) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    outbox = await make_outbox(settings=Settings(handler_timeout=0.05))  # type: ignore[arg-type]
    outbox.handler(MoneyDeposited, name="first")(stubborn)
    await outbox.executor.execute(Emit((1,)))
    try:
        async with outbox.running():
            await outbox.drain(timeout=10)
            release.set()
    finally:
        release.set()

    (stuck,) = [entry for entry in logged(caplog) if "is stuck" in entry]
    assert are_lines([stuck])
    assert "in stubborn: await release.wait()" in stuck


async def test_an_invalid_result_of_a_batch_is_not_quoted(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(envelopes: list[EventEnvelope[MoneyDeposited]]) -> list[Any]:
        return [envelope.event for envelope in envelopes]

    caplog.set_level(logging.DEBUG)
    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=2))(handler)
    await outbox.executor.execute(Emit((4242,)))

    assert (await outbox.drain()).failed == 1

    assert not any("4242" in entry for entry in logged(caplog))
    assert any("returned a MoneyDeposited as a failed item" in entry for entry in logged(caplog))
