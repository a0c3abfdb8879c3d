"""Traces: an action, its events and the runs of handlers are one trace, read from the exporter of a real SDK.

Rules that are the same on every database are in ``test_trace_rules.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from opentelemetry.trace import SpanKind

from outboxio import Batch, EventEnvelope, Outbox
from tests.kit.app import Look
from tests.kit.orders import Paid, Placed, PlaceOrder, Shipped
from tests.kit.traces import Traces, attributes, header_of, id_of, links_of, parent_of, trace_of

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]


@pytest.fixture
def traces() -> Traces:
    return Traces()


async def headers_by_type(look: Look) -> dict[str, Any]:
    """The headers of the events, by event type."""
    rows = {row["event_type"]: row["headers"] for row in await look.events()}
    return {name: msgspec.json.decode(text) if isinstance(text, str) else text for name, text in rows.items()}


async def test_one_trace_spans_request_and_handlers_of_every_delivery(
    make_outbox: MakeOutbox, look: Look, traces: Traces
) -> None:
    outbox = await make_outbox(telemetry=traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: EventEnvelope[Placed]) -> None:
        envelope.emit(Paid(envelope.event.order))

    @outbox.handler(Paid, name="ship", delivery="transactional")
    async def ship(envelope: EventEnvelope[Paid]) -> None:
        envelope.emit(Shipped(envelope.event.order))

    @outbox.handler(Shipped, name="tell", delivery="at_most_once")
    async def notify(envelope: EventEnvelope[Shipped]) -> None: ...

    with traces.tracer.start_as_current_span("request"):
        await outbox.execute(PlaceOrder(7), headers={"tenant": "a"}, correlation_id="r-1")
    await outbox.drain()

    chain = ["request", "execute PlaceOrder"]
    chain += [f"{operation} {event}" for event in ("Placed", "Paid", "Shipped") for operation in ("send", "process")]
    spans = [traces.one(name) for name in chain]
    assert traces.names == sorted(chain)
    assert [parent_of(span) for span in spans] == [None, *(id_of(span) for span in spans[:-1])]
    assert len({trace_of(span) for span in spans}) == 1
    headers = await headers_by_type(look)
    assert headers["Placed"] == {"tenant": "a", "traceparent": header_of(traces.one("send Placed"))}
    assert headers["Paid"] == {"traceparent": header_of(traces.one("send Paid"))}
    assert headers["Shipped"] == {"traceparent": header_of(traces.one("send Shipped"))}


async def test_the_spans_follow_the_semantic_conventions(make_outbox: MakeOutbox, look: Look, traces: Traces) -> None:
    outbox = await make_outbox(telemetry=traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: EventEnvelope[Placed]) -> None: ...

    await outbox.execute(PlaceOrder(7), correlation_id="r-1")
    await outbox.drain()

    (event,) = await look.events()
    place = {"outboxio.namespace": "app", "outboxio.shard": "default"}
    message = {
        "messaging.system": "outboxio",
        "messaging.destination.name": "Placed",
        "messaging.message.id": str(event["id"]),
        "messaging.message.conversation_id": "r-1",
    }
    execute, send, process = (traces.one(name) for name in ("execute PlaceOrder", "send Placed", "process Placed"))
    assert [span.kind for span in (execute, send, process)] == [SpanKind.INTERNAL, SpanKind.PRODUCER, SpanKind.CONSUMER]
    assert attributes(execute) == place | {
        "outboxio.action": "PlaceOrder",
        "outboxio.attempts": 1,
        "outboxio.outcome": "committed",
    }
    assert attributes(send) == place | message | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "outboxio.action": "PlaceOrder",
    }
    assert attributes(process) == place | message | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.subscription.name": "pay",
        "outboxio.attempt": 1,
        "outboxio.delivery": "at_least_once",
        "outboxio.outcome": "succeeded",
    }
    scope = process.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.schema_url) == ("outboxio", "https://opentelemetry.io/schemas/1.44.0")


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_a_batch_is_one_span_with_a_link_per_event(
    make_outbox: MakeOutbox, traces: Traces, delivery: Any
) -> None:
    outbox = await make_outbox(telemetry=traces.telemetry())

    @outbox.handler(Placed, name="pay", batch=Batch(size=10), delivery=delivery)
    async def pay(envelopes: list[EventEnvelope[Placed]]) -> None:
        for envelope in envelopes[:2]:
            envelope.emit(Paid(envelope.event.order))

    for order in range(3):
        await outbox.execute(PlaceOrder(order))
    await outbox.drain()

    batch, sends = traces.one("process Placed"), traces.named("send Placed")
    assert (batch.parent, sorted(links_of(batch))) == (None, sorted(map(id_of, sends)))
    assert attributes(batch)["messaging.batch.message_count"] == 3
    assert attributes(batch)["outboxio.outcome"] == "succeeded"
    assert [(parent_of(span), trace_of(span)) for span in traces.named("send Paid")] == [
        (id_of(batch), trace_of(batch))
    ] * 2


async def test_an_event_written_by_sql_with_a_traceparent_continues_the_trace(
    make_outbox: MakeOutbox, look: Look, traces: Traces
) -> None:
    outbox = await make_outbox(telemetry=traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: EventEnvelope[Placed]) -> None: ...

    await outbox.execute(PlaceOrder(1))
    traces.forget()
    header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await look.fetch("UPDATE {events} SET headers = $1", msgspec.json.encode({"traceparent": header}).decode())
    await outbox.drain()

    process = traces.one("process Placed")
    assert (trace_of(process), parent_of(process)) == (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
