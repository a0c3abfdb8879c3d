"""Many inbox messages are stored in a single transaction: each once, in order, and with its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outboxio import ConfigurationError, Event, EventEnvelope, InvalidEvent, Outbox, Received, Settings
from tests.kit.app import Look
from tests.kit.probes import doing, written

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

NEW, AGAIN, CONFLICT = Received.RECEIVED, Received.DUPLICATE, Received.CONFLICT


class InvoicePaid(Event):
    number: int


def message(number: int, external_id: str | None = None, **given: Any) -> dict[str, Any]:
    key = f"m-{number}" if external_id is None else external_id
    return {"source": "billing", "external_id": key, "type": "InvoicePaid", "payload": {"number": number}, **given}


async def consumed(look: Look) -> list[str]:
    return [row["external_id"] for row in await look.fetch("SELECT external_id FROM {consumed_events} ORDER BY 1")]


async def test_all_messages_are_stored_in_order_with_their_own_fields(outbox: Outbox, look: Look) -> None:
    seen: list[EventEnvelope[InvoicePaid]] = []

    @outbox.handler(InvoicePaid, name="first", ordered=True)
    async def first(envelope: EventEnvelope[InvoicePaid]) -> None:
        seen.append(envelope)

    numbers = [5, 3, 9, 1, 7]
    results = await outbox.inbox.receive_many(
        [message(n, headers={"n": n}, correlation_id=f"c-{n}", ordering_key=f"k-{n}") for n in numbers]
    )
    assert results == [NEW] * 5
    rows = await written(look)
    assert [row["payload"]["number"] for row in rows] == numbers
    assert (await outbox.drain()).succeeded == 5

    for envelope in seen:
        number = envelope.event.number
        assert (envelope.source, envelope.headers) == ("billing", {"n": number})
        assert (envelope.correlation_id, envelope.ordering_key) == (f"c-{number}", f"k-{number}")
        assert envelope.action_params == {"source": "billing", "external_id": f"m-{number}"}


async def test_each_message_has_its_own_result(outbox: Outbox, look: Look) -> None:
    assert await outbox.inbox.receive(**message(1)) is NEW

    results = await outbox.inbox.receive_many(
        [message(1), message(2), message(3, "m-1"), message(2), message(4, "m-2"), message(5)]
    )

    assert results == [AGAIN, NEW, CONFLICT, AGAIN, CONFLICT, NEW]
    assert outbox.inbox.conflicts == 2
    assert [row["payload"]["number"] for row in await written(look)] == [1, 2, 5]
    assert await consumed(look) == ["m-1", "m-2", "m-5"]
    assert await outbox.inbox.receive_many([message(n) for n in (1, 2, 5)]) == [AGAIN] * 3
    assert await outbox.inbox.receive(**message(5)) is AGAIN


async def test_an_empty_call_writes_nothing(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(record_empty_actions=True))
    assert await outbox.inbox.receive_many([]) == []
    assert await outbox.inbox.receive_many([message(1)]) == [NEW]
    [row] = await look.events()
    assert row["event_type"] == "InvoicePaid"


async def test_an_invalid_message_is_named_by_index_and_nothing_is_written(outbox: Outbox, look: Look) -> None:
    given = [message(1), message(2, payload="{"), message(3)]
    with pytest.raises(InvalidEvent, match=r"^messages\[1\]: payload of message 'm-2' from 'billing'"):
        await outbox.inbox.receive_many(given)
    assert (await look.events(), await consumed(look)) == ([], [])


@pytest.mark.parametrize(
    "invalid", [message(2, payload="{"), message(2, source=""), message(2, colour="red"), message(2, type=None), None]
)
async def test_an_invalid_message_is_returned_and_the_others_are_stored(
    outbox: Outbox, look: Look, invalid: Any
) -> None:
    first, second, third = await outbox.inbox.receive_many([message(1), invalid, message(3)], on_invalid="return")

    assert (first, third) == (NEW, NEW)
    assert isinstance(second, InvalidEvent)
    assert await consumed(look) == ["m-1", "m-3"]


async def test_messages_may_be_objects(outbox: Outbox, look: Look) -> None:
    given = SimpleNamespace(source="billing", external_id="m-1", event=InvoicePaid(7))
    assert await outbox.inbox.receive_many([given]) == [NEW]
    assert [row["payload"] for row in await written(look)] == [{"number": 7}]


async def test_many_messages_are_stored_in_the_callers_transaction(outbox: Outbox, look: Look) -> None:
    async def receive(tx: Any) -> list[Any]:
        results = await outbox.inbox.receive_many([message(1), message(2)], connection=tx.connection)
        assert await outbox.inbox.receive_many([message(2)], connection=tx.connection) == [AGAIN]
        return results

    async def receive_and_fail(tx: Any) -> None:
        await receive(tx)
        raise ValueError("and back")

    with pytest.raises(ValueError, match="and back"):
        await outbox.execute(doing(receive_and_fail))
    assert (await written(look), await consumed(look)) == ([], [])
    assert await outbox.execute(doing(receive)) == [NEW, NEW]
    rows = [row["event_type"] for row in await written(look) if row["action_name"] == "inbox.receive"]
    assert rows == ["InvoicePaid"] * 2


async def test_simultaneous_calls_store_each_message_once(outbox: Outbox, look: Look) -> None:
    given = [message(n) for n in range(40)]
    calls = [given[start:] + given[:start] for start in range(0, 40, 5)]

    results = await asyncio.gather(*(outbox.inbox.receive_many(call) for call in calls))

    assert sorted(str(result) for call in results for result in call) == [str(AGAIN)] * 280 + [str(NEW)] * 40
    assert len(await written(look)) == 40


async def test_a_lost_connection_leaves_all_or_nothing_for_the_retry(outbox: Outbox, look: Look) -> None:
    task = asyncio.create_task(outbox.inbox.receive_many([message(n) for n in range(300)]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(await written(look)) in (0, 300)

    results = await outbox.inbox.receive_many([message(n) for n in range(300)])
    assert set(results) <= {NEW, AGAIN}
    assert len(await written(look)) == len(await consumed(look)) == 300


async def test_a_running_process_handles_many_messages_at_once(make_outbox: MakeOutbox) -> None:
    outbox, seen, all_seen = await make_outbox(), list[int](), asyncio.Event()

    @outbox.handler(InvoicePaid, name="first")
    async def first(envelope: EventEnvelope[InvoicePaid]) -> None:
        seen.append(envelope.event.number)
        if len(seen) == 100:
            all_seen.set()

    async with outbox.running():
        await outbox.inbox.receive_many([message(n) for n in range(100)])
        await asyncio.wait_for(all_seen.wait(), 30)
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([], {"on_invalid": "ignore"}, "on_invalid is 'ignore'; expected 'raise' or 'return'"),
        (message(1), {}, "expected a list of messages"),
        ([message(1)] * 10_001, {}, "at most 10000"),
    ],
    ids=["on_invalid", "mapping", "too many"],
)
async def test_an_invalid_call_is_refused(outbox: Outbox, messages: Any, options: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        await outbox.inbox.receive_many(messages, **options)
