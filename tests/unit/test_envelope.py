from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgspec
import pytest

from outboxio import ConfigurationError, Event, EventEnvelope, InvalidEvent, TooManyHops
from outboxio.model.emitter import Cause, Emitter
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import EventTypes
from outboxio.model.notification import Context, Notification
from outboxio.support.clock import as_micros

NOON = datetime(2030, 1, 1, 12)


class Opened(Event):
    number: int = 0


class Executed:
    """Remembers the actions to execute, and where."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, str | None]] = []

    async def __call__(self, action: Any, *, shard: str | None = None) -> Any:
        self.calls.append((action, shard))
        return "result"


def notification(**columns: Any) -> Notification:
    row: dict[str, Any] = {
        "id": UUID(int=1),
        "event_id": UUID(int=2),
        "handler_name": "first",
        "action_id": UUID(int=3),
        "action_name": "Open",
        "action_params": '{"number": 7}',
        "started_date": NOON,
        "completion_date": NOON + timedelta(seconds=1),
        "model_id": "w-1",
        "model_type": "Wallet",
        "event_type": "Opened",
        "payload": "{}",
        "state": "PENDING",
        "event_date": NOON + timedelta(seconds=2),
        "attempts": 2,
        "next_retry_us": as_micros(NOON),
        "retention_us": as_micros(NOON),
        "sequence": 5,
        "partition_number": 0,
        "correlation_id": "request-7",
        "causation_id": UUID(int=4),
        "headers": '{"traceparent": "00-ab"}',
        "hops": 3,
        "ordering_key": None,
        "created_date": NOON,
    }
    row.update(columns)
    for column in ("action_params", "headers"):
        row[column] = msgspec.Raw(b"null" if row[column] is None else row[column].encode())
    context = Context(**{column: row.pop(column) for column in Context.__struct_fields__})
    return Notification(**row, raw_context=context)


def envelope(
    *, max_hops: int = 32, execute: Any = None, resources: Any = None, stopping: asyncio.Event | None = None, **row: Any
) -> EventEnvelope[Opened]:
    context = HandlerContext(
        namespace="app",
        shard="two",
        resources=resources,
        stopping=stopping or asyncio.Event(),
        emitter=Emitter(EventTypes(), stores_nul=False, max_hops=max_hops),
        execute=execute or Executed(),
        join=Executed(),
        outbox=None,
    )
    return EventEnvelope(Opened(), notification(**row), context)


def test_an_envelope_describes_event_delivery_and_action() -> None:
    it = envelope(resources="resources")

    assert (it.event, it.event_id, it.event_type) == (Opened(), UUID(int=2), "Opened")
    assert (it.notification_id, it.namespace, it.shard, it.resources) == (UUID(int=1), "app", "two", "resources")
    assert (it.action_id, it.action_name, it.action_params) == (UUID(int=3), "Open", {"number": 7})
    assert (it.started_date, it.completion_date) == (NOON, NOON + timedelta(seconds=1))
    assert it.event_date == NOON + timedelta(seconds=2)
    assert (it.model_id, it.model_type) == ("w-1", "Wallet")
    assert (it.correlation_id, it.causation_id, it.headers) == ("request-7", UUID(int=4), {"traceparent": "00-ab"})


def test_attempts_count_from_one() -> None:
    assert [envelope(attempts=attempts).attempt for attempts in (0, 1, 9)] == [1, 2, 10]


def test_no_headers_are_an_empty_mapping() -> None:
    assert envelope(headers=None).headers == {}


def test_stopping_is_the_flag_of_the_outbox() -> None:
    stopping = asyncio.Event()
    it = envelope(stopping=stopping)
    before = it.stopping.is_set()
    stopping.set()

    assert (before, it.stopping.is_set()) == (False, True)


def test_emitted_events_are_kept_as_records_in_order() -> None:
    it = envelope()
    assert it.emitted == []
    later = datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=1)))

    it.emit(Opened(1), model_id=7, model_type="Wallet", ordering_key="k", topic="audit", available_at=later)
    it.emit(Opened(2))

    first, second = it.emitted
    assert (first.event_type, first.payload) == ("Opened", '{"number":1}')
    assert (first.model_id, first.model_type, first.ordering_key, first.topic) == ("7", "Wallet", "k", "audit")
    assert first.available_at == datetime(2030, 1, 1, 13)
    assert (second.payload, second.model_id, second.available_at) == ('{"number":2}', None, None)
    assert first.id < second.id


def test_an_event_that_cannot_be_stored_is_refused_by_emit() -> None:
    it = envelope()
    for refused in (lambda: it.emit("no event"), lambda: it.emit(Opened(), model_id="a\0b")):  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent):
            refused()
    assert it.emitted == []


def test_the_longest_chain_has_max_hops_events_after_the_first() -> None:
    envelope(max_hops=3, hops=2).emit(Opened())
    with pytest.raises(TooManyHops):
        envelope(max_hops=3, hops=3).emit(Opened())


def test_the_cause_is_the_handled_event() -> None:
    assert envelope().cause == Cause(UUID(int=2), "first", "request-7", 3)


async def test_execute_runs_on_the_shard_of_the_event_by_default() -> None:
    executed = Executed()
    it: Any = envelope(execute=executed)

    assert await it.execute("action") == "result"
    await it.execute("action", shard="one")

    assert executed.calls == [("action", "two"), ("action", "one")]


def test_the_repr_of_an_envelope_shows_its_fields() -> None:
    assert repr(envelope()) == f"<EventEnvelope Opened {UUID(int=2)} for 'first', attempt 3>"


def received(source: str = "stripe", external_id: str = "evt_1", **row: Any) -> EventEnvelope[Opened]:
    params = f'{{"source": "{source}", "external_id": "{external_id}"}}'
    return envelope(action_name="inbox.receive", action_params=params, **row)


def test_an_idempotency_key_never_changes() -> None:
    assert envelope().idempotency_key("charge") == UUID("83c25185-5538-5ebb-85c4-bccf82962d7a")
    assert received().idempotency_key("charge") == UUID("17e93ce7-9e75-58ed-9b86-e46d3c496e5b")


def test_an_idempotency_key_is_the_same_for_each_attempt() -> None:
    again = envelope(id=UUID(int=99), attempts=8, next_retry_us=0, sequence=9, partition_number=4)

    assert again.idempotency_key("charge") == envelope().idempotency_key("charge")


def test_a_redelivered_message_keeps_its_idempotency_key() -> None:
    assert received(event_id=UUID(int=99)).idempotency_key("charge") == received().idempotency_key("charge")


def test_idempotency_keys_differ_by_name_handler_and_event() -> None:
    keys = [
        envelope().idempotency_key("charge"),
        envelope().idempotency_key("refund"),
        envelope().idempotency_key("Charge"),
        envelope(handler_name="second").idempotency_key("charge"),
        envelope(event_id=UUID(int=99)).idempotency_key("charge"),
        envelope(handler_name="first/a").idempotency_key("b"),
        envelope(handler_name="first").idempotency_key("a/b"),
        received().idempotency_key("charge"),
        received("github").idempotency_key("charge"),
        received(external_id="evt_2").idempotency_key("charge"),
        received("stripee", "vt_1").idempotency_key("charge"),
        received(handler_name="second").idempotency_key("charge"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["", " ", None, 5, b"charge"])
def test_an_idempotency_key_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="pass a name for the effect, such as 'charge'"):
        envelope().idempotency_key(name)
