"""Rules of traces that are the same on every database: parents and links, sampling, headers, outcomes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import StatusCode
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outboxio import (
    Batch,
    CommitUnknown,
    ConfigurationError,
    EventEnvelope,
    Outbox,
    Received,
    RetryPolicy,
    Settings,
    StaleRecord,
    Transaction,
    Unprocessable,
)
from outboxio.integrations.asgi import OriginMiddleware
from outboxio.integrations.opentelemetry import OpenTelemetry, trace_headers
from outboxio.telemetry import Call, HandlingTelemetry, Telemetry
from outboxio.testing import MovableClock
from tests.kit.app import Look, eventually
from tests.kit.orders import Paid, PayOrder, Placed, PlaceOrder, Shipped
from tests.kit.traces import Traces, attributes, header_of, id_of, links_of, parent_of, trace_of

pytestmark = pytest.mark.slow

REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REMOTE_TRACE, REMOTE_SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
UNSAMPLED = REMOTE[:-1] + "0"

MakeOutbox = Callable[..., Awaitable[Outbox]]
OfPlaced = EventEnvelope[Placed]


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def look(sqlite_url: str) -> Look:
    return Look(sqlite_url)


@pytest.fixture
async def make(sqlite_url: str, clock: MovableClock) -> AsyncIterator[MakeOutbox]:
    async with AsyncExitStack() as stack:

        async def make(telemetry: Any, **options: Any) -> Outbox:
            outbox = Outbox(sqlite_url, namespace="app", clock=clock, telemetry=telemetry, **options)
            await stack.enter_async_context(outbox)
            await outbox.migrate()
            return outbox

        yield make


async def headers_of_events(look: Look) -> list[Any]:
    rows = await look.events()
    return [None if row["headers"] is None else msgspec.json.decode(row["headers"]) for row in rows]


def fails_until(attempt: int, error: Exception) -> Callable[[EventEnvelope[Any]], Awaitable[None]]:
    async def handle(envelope: EventEnvelope[Any]) -> None:
        if envelope.attempt < attempt:
            raise error

    return handle


# --- parents and links -----------------------------------------------------------------------------


async def test_a_first_attempt_is_a_child_and_retries_are_links(
    make: MakeOutbox, clock: MovableClock, traces: Traces
) -> None:
    outbox = await make(traces.telemetry())
    outbox.handler(Placed, name="pay", retry=RetryPolicy(jitter=0))(fails_until(2, ValueError("no money")))
    await outbox.execute(PlaceOrder(1))
    await outbox.drain()
    clock.advance(timedelta(seconds=31))
    await outbox.drain()

    send = traces.one("send Placed")
    first, second = traces.named("process Placed")
    assert (trace_of(first), parent_of(first), links_of(first)) == (trace_of(send), id_of(send), [])
    assert (second.parent, links_of(second)) == (None, [id_of(send)])
    assert trace_of(second) != trace_of(send)
    assert {name: value for name, value in attributes(first).items() if name.startswith(("outboxio.", "error"))} == {
        "outboxio.namespace": "app",
        "outboxio.shard": "default",
        "outboxio.delivery": "at_least_once",
        "outboxio.attempt": 1,
        "outboxio.outcome": "retry",
        "outboxio.retry_at": "2030-01-01T12:00:30.000Z",
        "error.type": "ValueError",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "ValueError: no money"
    assert (attributes(second)["outboxio.attempt"], attributes(second)["outboxio.outcome"]) == (2, "succeeded")
    assert second.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("after", "is_child"), [(timedelta(minutes=5), True), (timedelta(minutes=5, seconds=1), False)]
)
async def test_a_first_attempt_is_a_child_for_five_minutes(
    make: MakeOutbox, clock: MovableClock, traces: Traces, after: timedelta, is_child: bool
) -> None:
    outbox = await make(traces.telemetry())
    outbox.handler(Placed, name="pay")(fails_until(0, ValueError()))
    await outbox.execute(PlaceOrder(1))
    clock.advance(after)
    await outbox.drain()

    send, process = traces.one("send Placed"), traces.one("process Placed")
    assert (parent_of(process), links_of(process)) == ((id_of(send), []) if is_child else (None, [id_of(send)]))


@pytest.mark.parametrize(
    ("propagation", "children", "linked"), [("parent", 2, 0), ("link", 0, 2), ("none", 0, 0), ("auto", 1, 1)]
)
async def test_the_application_chooses_parents_links_or_nothing(
    make: MakeOutbox, clock: MovableClock, traces: Traces, propagation: Any, children: int, linked: int
) -> None:
    outbox = await make(traces.telemetry(propagation=propagation))
    outbox.handler(Placed, name="pay", retry=RetryPolicy(jitter=0))(fails_until(2, ValueError()))
    await outbox.execute(PlaceOrder(1))
    await outbox.drain()
    clock.advance(timedelta(seconds=31))
    await outbox.drain()

    runs = traces.named("process Placed")
    assert len(runs) == 2
    assert [parent_of(run) for run in runs].count(id_of(traces.one("send Placed"))) == children
    assert sum(len(links_of(run)) for run in runs) == linked


async def test_a_batch_has_at_most_128_links(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay", batch=Batch(size=200))
    async def pay(envelopes: list[OfPlaced]) -> None: ...

    for order in range(150):
        await outbox.execute(PlaceOrder(order))
    await outbox.drain()

    batch = traces.one("process Placed")
    assert (len(batch.links), attributes(batch)["messaging.batch.message_count"]) == (128, 150)


async def test_a_hook_has_its_own_linked_span_and_trace(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    async def notify(envelope: EventEnvelope[Any], error: Any) -> None:
        envelope.emit(Shipped(envelope.event.order))

    @outbox.handler(Placed, name="pay", on_dead=notify)
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable("never")

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    hook = traces.one("on_dead pay")
    assert attributes(traces.one("process Placed"))["outboxio.outcome"] == "dead"
    assert (hook.parent, links_of(hook)) == (None, [id_of(traces.one("send Placed"))])
    assert attributes(hook)["outboxio.outcome"] == "succeeded"
    assert parent_of(traces.one("send Shipped")) == id_of(hook)


async def test_a_span_around_running_is_not_a_parent_of_runs(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay", trace=False)
    async def pay(envelope: OfPlaced) -> None:
        await envelope.execute(PayOrder(1))

    await outbox.execute(PlaceOrder(1))
    with traces.tracer.start_as_current_span("start of the program") as around:
        async with outbox.running():
            await eventually(lambda: traces.named("send Paid"))

    assert trace_of(traces.one("execute PayOrder")) != around.get_span_context().trace_id


async def test_actions_of_a_handler_are_children_of_the_run(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="execute")
    async def execute(envelope: OfPlaced) -> None:
        await envelope.execute(PayOrder(1))

    @outbox.handler(Placed, name="join", delivery="transactional")
    async def join(envelope: OfPlaced) -> None:
        await envelope.execute(PayOrder(2))

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    runs = {
        attributes(span)["messaging.destination.subscription.name"]: span for span in traces.named("process Placed")
    }
    by_outcome = {attributes(span)["outboxio.outcome"]: span for span in traces.named("execute PayOrder")}
    assert {outcome: parent_of(span) for outcome, span in by_outcome.items()} == {
        "committed": id_of(runs["execute"]),
        "joined": id_of(runs["join"]),
    }
    assert sorted(map(parent_of, traces.named("send Paid"))) == sorted(map(id_of, by_outcome.values()))


# --- sampling --------------------------------------------------------------------------------------


async def test_an_unsampled_trace_has_headers_and_no_spans(make: MakeOutbox, look: Look) -> None:
    traces = Traces(ParentBased(ALWAYS_OFF))
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(envelope.event.order))
        await envelope.execute(PayOrder(2))

    @outbox.handler(Paid, name="ship", batch=Batch(size=10))
    async def ship(envelopes: list[EventEnvelope[Paid]]) -> None:
        for envelope in envelopes:
            envelope.emit(Shipped(envelope.event.order))

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    parents = [headers["traceparent"] for headers in await headers_of_events(look)]
    assert len(parents) == 5
    assert {parent[3:35] for parent in parents} == {parents[0][3:35]}
    assert not any(int(parent[-2:], 16) & 1 for parent in parents)
    assert traces.names == []


async def test_the_sampling_decision_of_an_event_applies_to_its_actions(make: MakeOutbox, look: Look) -> None:
    traces = Traces(ParentBased(ALWAYS_ON))
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        await envelope.execute(PayOrder(1))

    await outbox.inbox.receive(source="s", external_id="1", event=Placed(1), headers={"traceparent": UNSAMPLED})
    await outbox.drain()

    assert [headers["traceparent"][3:35] for headers in await headers_of_events(look)] == [UNSAMPLED[3:35]] * 2
    assert traces.names == []


async def test_events_without_a_trace_start_no_trace(make: MakeOutbox, look: Look, traces: Traces) -> None:
    async with Outbox(look.url, namespace="app") as writer:
        await writer.migrate()
        await writer.execute(PlaceOrder(1))
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(1))

    @outbox.handler(Paid, name="ship", delivery="transactional")
    async def ship(envelope: EventEnvelope[Paid]) -> None:
        envelope.emit(Shipped(1))

    await outbox.drain()

    assert await headers_of_events(look) == [None, None, None]
    assert traces.names == []


@pytest.mark.parametrize("header", [None, UNSAMPLED])
async def test_trace_unsampled_calls_the_sampler_for_every_run(
    make: MakeOutbox, look: Look, traces: Traces, header: str | None
) -> None:
    sampler = Traces(ALWAYS_ON)
    outbox = await make(sampler.telemetry(trace_unsampled=True))

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None: ...

    @outbox.handler(Placed, name="batch", batch=Batch(size=10))
    async def batch(envelopes: list[OfPlaced]) -> None: ...

    await outbox.execute(PlaceOrder(1))
    sampler.forget()
    headers = None if header is None else msgspec.json.encode({"traceparent": header}).decode()
    await look.fetch("UPDATE {events} SET headers = $1", headers)
    await outbox.drain()

    alone, together = sorted(
        sampler.named("process Placed"), key=lambda span: "outboxio.attempt" not in attributes(span)
    )
    assert (parent_of(alone), together.parent) == (None if header is None else REMOTE_SPAN, None)


async def test_text_that_looks_like_the_header_makes_no_span(make: MakeOutbox, look: Look, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    outbox.handler(Placed, name="pay")(fails_until(0, ValueError()))
    await outbox.execute(PlaceOrder(1))
    traces.forget()
    headers = {"note": {"traceparent": REMOTE}, "traceparent": UNSAMPLED}
    await look.fetch("UPDATE {events} SET headers = $1", msgspec.json.encode(headers).decode())
    await outbox.drain()

    assert traces.names == []


@pytest.mark.parametrize(
    "header", ["", "00-0", "garbage", 7, None, ["x"], "00-00000000000000000000000000000000-00f067aa0ba902b7-01"]
)
async def test_an_invalid_trace_header_is_ignored(make: MakeOutbox, look: Look, traces: Traces, header: Any) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(1))

    await outbox.execute(PlaceOrder(1))
    traces.forget()
    await look.fetch("UPDATE {events} SET headers = $1", msgspec.json.encode({"traceparent": header}).decode())

    assert (await outbox.drain()).succeeded == 1
    assert traces.names == []


async def test_trace_false_skips_a_handlers_runs_and_the_trace_continues(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay", trace=False)
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(1))

    @outbox.handler(Placed, name="batch", trace=False, batch=Batch(size=10))
    async def batch(envelopes: list[OfPlaced]) -> None: ...

    @outbox.handler(Paid, name="ship")
    async def ship(envelope: EventEnvelope[Paid]) -> None: ...

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert traces.named("process Placed") == []
    assert parent_of(traces.one("send Paid")) == id_of(traces.one("send Placed"))
    assert parent_of(traces.one("process Paid")) == id_of(traces.one("send Paid"))


# --- outcomes --------------------------------------------------------------------------------------


async def test_a_refused_action_has_its_error(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    class Refused(PlaceOrder):
        async def perform(self, tx: Transaction) -> None:
            await super().perform(tx)
            raise LookupError("secret")

    with pytest.raises(LookupError):
        await outbox.execute(Refused(1))

    execute = traces.one("execute Refused")
    assert (attributes(execute)["outboxio.outcome"], attributes(execute)["error.type"]) == ("refused", "LookupError")
    assert (execute.status.status_code, execute.status.description, execute.events) == (StatusCode.ERROR, None, ())
    assert traces.names == ["execute Refused"]


def test_an_action_with_an_unknown_outcome_is_marked(traces: Traces) -> None:
    action_id = uuid4()
    with pytest.raises(CommitUnknown), traces.telemetry().executing("app", "default", "Pay", None):
        raise CommitUnknown("Pay", action_id)

    assert attributes(traces.one("execute Pay"))["outboxio.outcome"] == "unknown"


async def test_an_action_counts_its_attempts(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    left = [StaleRecord("Order", 1), StaleRecord("Order", 1)]

    class Stale(PlaceOrder):
        async def perform(self, tx: Transaction) -> None:
            if left:
                raise left.pop()
            await super().perform(tx)

    await outbox.execute(Stale(1))

    assert attributes(traces.one("execute Stale"))["outboxio.attempts"] == 3
    assert attributes(traces.one("execute Stale"))["outboxio.outcome"] == "committed"
    assert len(traces.named("send Placed")) == 1


async def test_the_error_on_a_span_is_redacted(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry(), redact=lambda text: text.replace("4711", "****"))
    outbox.handler(Placed, name="pay")(fails_until(9, ValueError("card 4711")))
    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert traces.one("process Placed").status.description == "ValueError: card ****"


async def test_a_run_interrupted_by_leaving_is_marked(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry(), settings=Settings(shutdown_timeout=timedelta(0)))
    started = asyncio.Event()

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        started.set()
        await asyncio.Event().wait()

    await outbox.execute(PlaceOrder(1))
    async with outbox.running():
        await started.wait()

    process = traces.one("process Placed")
    assert (attributes(process)["outboxio.outcome"], process.status.status_code) == ("cut_short", StatusCode.UNSET)


async def test_a_batch_has_the_worst_outcome_of_its_rows(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay", batch=Batch(size=10))
    async def pay(envelopes: list[OfPlaced]) -> list[Any]:
        return [(envelopes[0], ValueError("later")), (envelopes[1], Unprocessable("never"))]

    for order in range(4):
        await outbox.execute(PlaceOrder(order))
    await outbox.drain()

    batch = traces.one("process Placed")
    assert (attributes(batch)["outboxio.outcome"], attributes(batch)["error.type"]) == ("dead", "Unprocessable")


# --- headers ---------------------------------------------------------------------------------------


async def test_several_types_of_an_action_are_one_span_per_namespace(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    async with outbox.transaction("Both") as tx:
        tx.emit(Placed(1))
        tx.emit(Paid(1))

    send = traces.one("send app")
    assert attributes(send)["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in attributes(send)


async def test_an_action_without_events_writes_no_trace(make: MakeOutbox, look: Look, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    async with outbox.transaction("Nothing"):
        pass

    assert (traces.names, await headers_of_events(look)) == (["execute Nothing"], [None])


async def test_without_a_current_span_the_trace_of_the_headers_continues(
    make: MakeOutbox, look: Look, traces: Traces
) -> None:
    outbox = await make(traces.telemetry())
    given = {"traceparent": REMOTE, "tracestate": "vendor=1", "tenant": "a"}

    await outbox.execute(PlaceOrder(1), headers=given)

    execute, send = traces.one("execute PlaceOrder"), traces.one("send Placed")
    assert (trace_of(execute), parent_of(execute)) == (REMOTE_TRACE, REMOTE_SPAN)
    assert await headers_of_events(look) == [{"tenant": "a", "traceparent": header_of(send), "tracestate": "vendor=1"}]


async def test_the_current_span_takes_precedence_over_headers(make: MakeOutbox, look: Look, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    with traces.tracer.start_as_current_span("request") as request:
        await outbox.execute(PlaceOrder(1), headers={"traceparent": REMOTE, "tracestate": "vendor=1"})

    assert parent_of(traces.one("execute PlaceOrder")) == request.get_span_context().span_id
    assert await headers_of_events(look) == [{"traceparent": header_of(traces.one("send Placed"))}]


async def test_the_trace_of_a_request_without_a_span_continues(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await outbox.execute(PlaceOrder(1))

    unused: Any = None
    scope = {"type": "http", "headers": [(b"traceparent", REMOTE.encode())]}
    await OriginMiddleware(application)(scope, unused, unused)

    assert parent_of(traces.one("execute PlaceOrder")) == REMOTE_SPAN


async def test_baggage_is_propagated_only_on_request(make: MakeOutbox, look: Look, traces: Traces) -> None:
    seen: list[Mapping[str, object]] = []
    token = context.attach(baggage.set_baggage("tenant", "a"))
    try:
        quiet = await make(traces.telemetry())
        await quiet.execute(PlaceOrder(1))
        assert list((await headers_of_events(look))[0]) == ["traceparent"]
        propagating = await make(traces.telemetry(baggage=True))
        await propagating.execute(PlaceOrder(2))
        assert (await headers_of_events(look))[1]["baggage"] == "tenant=a"
    finally:
        context.detach(token)

    @propagating.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        seen.append(baggage.get_all())

    await propagating.drain()
    assert seen == [{}, {"tenant": "a"}]


async def test_recorded_and_bound_events_are_children_of_the_current_span(look: Look, traces: Traces) -> None:
    engine = create_async_engine(look.url.replace("sqlite:", "sqlite+aiosqlite:"))
    maker = async_sessionmaker(engine)
    async with Outbox(engine, namespace="app", telemetry=traces.telemetry()) as outbox:
        await outbox.migrate()
        with traces.tracer.start_as_current_span("request") as request:
            async with maker.begin() as session:
                await outbox.record(session, Placed(1), action="Place", headers={"tenant": "a"})
            async with maker.begin() as session:
                outbox.bind(session, action="Pay").emit(Paid(1))
    await engine.dispose()

    sends = [traces.one("send Placed"), traces.one("send Paid")]
    assert [parent_of(send) for send in sends] == [request.get_span_context().span_id] * 2
    assert await headers_of_events(look) == [
        {"tenant": "a", "traceparent": header_of(sends[0])},
        {"traceparent": header_of(sends[1])},
    ]


async def test_external_writers_can_get_the_trace_headers(traces: Traces) -> None:
    assert trace_headers() == {}
    with traces.tracer.start_as_current_span("request"):
        given = trace_headers()
    assert given == {"traceparent": header_of(traces.one("request"))}


async def test_without_an_sdk_no_trace_is_written(make: MakeOutbox, look: Look) -> None:
    outbox = await make(OpenTelemetry())
    outbox.handler(Placed, name="pay")(fails_until(0, ValueError()))
    await outbox.execute(PlaceOrder(1))

    assert (await outbox.drain()).succeeded == 1
    assert await headers_of_events(look) == [None]


# --- the inbox -------------------------------------------------------------------------------------


async def test_a_received_message_continues_the_trace_of_its_headers(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())
    outbox.handler(Placed, name="pay")(fails_until(0, ValueError()))
    message: Any = {"source": "s", "external_id": "1", "event": Placed(1), "headers": {"traceparent": REMOTE}}
    assert await outbox.inbox.receive(**message) is Received.RECEIVED
    assert await outbox.inbox.receive(**message) is Received.DUPLICATE
    await outbox.drain()

    first, second = traces.named("execute inbox.receive")
    chain = [first, traces.one("send Placed"), traces.one("process Placed")]
    assert [parent_of(span) for span in chain] == [REMOTE_SPAN, *map(id_of, chain[:2])]
    assert [attributes(span)["outboxio.outcome"] for span in (first, second)] == ["committed", "duplicate"]
    assert second.status.status_code is StatusCode.UNSET


async def test_a_consumed_message_is_a_child_of_its_consumer_or_headers(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry())

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(1))

    @outbox.handler(Placed, name="late", ordered=True)
    async def late(envelope: OfPlaced) -> None: ...

    message: Any = {"source": "s", "event": Placed(1), "headers": {"traceparent": REMOTE}}
    await outbox.inbox.consume(external_id="1", **message)
    run, paid, stored = traces.one("process Placed"), traces.one("send Paid"), traces.one("send Placed")
    assert (parent_of(run), parent_of(paid), parent_of(stored)) == (REMOTE_SPAN, id_of(run), REMOTE_SPAN)

    traces.forget()
    with traces.tracer.start_as_current_span("consumer") as consumer:
        await outbox.inbox.consume(external_id="2", **message)
    run, around = traces.one("process Placed"), consumer.get_span_context().span_id
    assert (parent_of(run), links_of(run)) == (around, [REMOTE_SPAN])
    assert parent_of(traces.one("send Placed")) == around

    traces.forget()
    await outbox.inbox.consume(source="s", external_id="3", event=Placed(1))
    assert traces.named("process Placed") == []


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_a_consumed_message_has_the_error_of_its_handler(make: MakeOutbox, traces: Traces, delivery: Any) -> None:
    outbox = await make(traces.telemetry())
    outbox.handler(Placed, name="pay", delivery=delivery)(fails_until(9, ValueError()))
    message: Any = {"source": "s", "external_id": "1", "event": Placed(1), "headers": {"traceparent": REMOTE}}
    with pytest.raises(BaseExceptionGroup):
        await outbox.inbox.consume(**message)

    run = traces.one("process Placed")
    assert (attributes(run)["outboxio.outcome"], attributes(run)["error.type"]) == ("failed", "ValueError")
    assert run.status.status_code is StatusCode.ERROR


# --- the telemetry interface -----------------------------------------------------------------------


async def test_rounds_that_did_something_have_spans_on_request(make: MakeOutbox, traces: Traces) -> None:
    outbox = await make(traces.telemetry(internals=True))
    outbox.handler(Placed, name="pay")(fails_until(0, ValueError()))
    async with outbox.running():
        await outbox.execute(PlaceOrder(1))
        await eventually(lambda: traces.named("settle"))

    assert [attributes(span)["outboxio.rows"] for name in ("fanout", "settle") for span in traces.named(name)] == [1, 1]
    assert [span.parent for span in (traces.one("fanout"), traces.one("settle"))] == [None, None]
    assert traces.named("purge") == []


async def test_several_telemetries_are_notified_of_everything(make: MakeOutbox, look: Look, traces: Traces) -> None:
    class Counting(Telemetry):
        def __init__(self) -> None:
            self.failed: list[str] = []

        def handling(self, *args: Any, **options: Any) -> HandlingTelemetry:
            telemetry = self

            class Failures(HandlingTelemetry):
                def failed(self, handler: Any, row: Any, error: BaseException, outcome: Any, redact: Any) -> None:
                    telemetry.failed.append(f"{handler.name}: {error}")

                def call(self, handler: Any, row: Any) -> Call:
                    return Call()

            return Failures()

    counting = Counting()
    outbox = await make([traces.telemetry(), counting])
    outbox.handler(Placed, name="pay")(fails_until(9, ValueError("no money")))
    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert counting.failed == ["pay: no money"]
    assert traces.names == ["execute PlaceOrder", "process Placed", "send Placed"]
    assert await headers_of_events(look) == [{"traceparent": header_of(traces.one("send Placed"))}]


class Broken(HandlingTelemetry):
    """Telemetry that fails in the method with this name."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def _fail(self, name: str) -> None:
        if name == self.fails:
            raise OSError("no tracer")

    def call(self, handler: Any, row: Any) -> Call:
        self._fail("call")
        return BrokenCall(self)

    def batch_call(self, handler: Any, rows: Any) -> Call:
        self._fail("call")
        return BrokenCall(self)

    def failed(self, *args: Any) -> None:
        self._fail("failed")


class BrokenCall(Call):
    def __init__(self, telemetry: Broken) -> None:
        self._fail = telemetry._fail

    def __enter__(self) -> Any:
        self._fail("enter")

    def __exit__(self, *args: Any) -> None:
        self._fail("exit")

    def ended(self, outcome: Any) -> None:
        self._fail("ended")


@pytest.mark.parametrize("fails", ["call", "enter", "exit", "ended", "failed"])
async def test_failing_telemetry_changes_no_outcome(
    make: MakeOutbox, fails: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class OfShard(Telemetry):
        def handling(self, *args: Any, **options: Any) -> HandlingTelemetry:
            return Broken(fails)

    outbox = await make(OfShard())
    outbox.handler(Placed, name="good")(fails_until(0, ValueError()))
    outbox.handler(Placed, name="bad", retry=RetryPolicy(max_attempts=1))(fails_until(9, ValueError()))

    @outbox.handler(Placed, name="batch", batch=Batch(size=10))
    async def batch(envelopes: list[OfPlaced]) -> None: ...

    await outbox.execute(PlaceOrder(1))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead) == (2, 1)
    assert "no tracer" in caplog.text + capsys.readouterr().err
    logged = [record for record in caplog.records if record.message.startswith("telemetry failed; the run continues")]
    assert all(vars(record)["outboxio_handler"] in ("good", "bad", "batch") for record in logged)
    assert bool(logged) == (fails != "failed")


@pytest.mark.parametrize("headers", ["[1]", "7", '"text"', '"{\\"traceparent\\":7}"'])
async def test_headers_that_are_not_an_object_are_no_trace(
    make: MakeOutbox, look: Look, traces: Traces, headers: str
) -> None:
    outbox = await make(traces.telemetry(trace_unsampled=True))

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(1))
        await envelope.execute(PayOrder(1))

    await outbox.execute(PlaceOrder(1))
    await look.fetch("UPDATE {events} SET headers = $1", headers)

    assert (await outbox.drain()).succeeded == 1
    assert traces.one("process Placed").parent is None


@pytest.mark.parametrize("given", [object(), "opentelemetry", [object()], OpenTelemetry])
def test_a_value_that_is_not_telemetry_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected an object of a subclass of outboxio"):
        Outbox("sqlite://", namespace="app", telemetry=given)


def test_an_unknown_propagation_is_refused() -> None:
    unknown: Any = "child"
    with pytest.raises(ConfigurationError, match="propagation is 'child'; expected one of 'auto', 'link'"):
        OpenTelemetry(propagation=unknown)


def test_opentelemetry_is_not_imported_without_telemetry() -> None:
    program = (
        "import sys, outboxio; outboxio.Outbox('sqlite://', namespace='a'); sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
