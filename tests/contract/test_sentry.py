"""Sentry: a dead notification is an issue, a retry is not; spans, and a trace across processes.

A real client of the SDK sends its envelopes to a transport that collects them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from outboxio import Batch, ConfigurationError, EventEnvelope, Outbox, RetryAfter, RetryPolicy, Settings, Unprocessable
from outboxio.integrations.sentry import OutboxIntegration
from outboxio.telemetry.protocol import remove_from_process
from outboxio.testing import MovableClock
from tests.kit.app import Look
from tests.kit.inside import telemetry_of_process
from tests.kit.orders import Paid, Placed, PlaceOrder
from tests.kit.traces import Traces

MakeOutbox = Callable[..., Awaitable[Outbox]]
OfPlaced = EventEnvelope[Placed]


class Kept(Transport):
    """Collects the events and transactions that a client sends."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.issues: list[Any] = []
        self.transactions: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if (transaction := item.get_transaction_event()) is not None:
                self.transactions.append(transaction)
            elif (event := item.get_event()) is not None:
                self.issues.append(event)

    def spans(self, op: str) -> list[Any]:
        return [span for transaction in self.transactions for span in transaction["spans"] if span["op"] == op]


Init = Callable[..., Kept]


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Iterator[Init]:
    """Start a client of the SDK, with only the given integrations, and leave nothing behind."""
    before = sentry_sdk.get_global_scope().client
    # The SDK sets up an integration once per process, so each test starts without any, and removes its own.
    for names in ("_processed_integrations", "_installed_integrations"):
        monkeypatch.setattr(sentry_sdk.integrations, names, set())
    monkeypatch.setattr(logging.Logger, "callHandlers", logging.Logger.callHandlers)  # LoggingIntegration wraps it

    def start(*integrations: Any, **options: Any) -> Kept:
        kept = Kept({"dsn": "https://key@sentry.invalid/1"})
        sentry_sdk.init(
            "https://key@sentry.invalid/1", transport=kept, integrations=integrations, default_integrations=False,
            auto_enabling_integrations=False, **options,
        )  # fmt: skip
        return kept

    yield start
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(before)
    for telemetry in telemetry_of_process():
        remove_from_process(telemetry)


@pytest.fixture
async def make(sqlite_url: str, clock: MovableClock) -> AsyncIterator[MakeOutbox]:
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Outbox:
            outbox = await stack.enter_async_context(Outbox(sqlite_url, namespace="shop", clock=clock, **options))
            await outbox.migrate()
            return outbox

        yield make


async def exhaust(outbox: Outbox, clock: MovableClock, times: int = 5) -> None:
    """Drain repeatedly, after each backoff."""
    for _ in range(times):
        await outbox.drain()
        clock.advance(timedelta(hours=1))


async def test_a_dead_notification_is_one_issue_and_retries_are_none(
    make: MakeOutbox, clock: MovableClock, init: Init
) -> None:
    kept = init(OutboxIntegration(), LoggingIntegration(event_level=logging.ERROR))
    outbox = await make()

    @outbox.handler(Placed, name="pay", retry=RetryPolicy(max_attempts=3))
    async def pay(envelope: OfPlaced) -> None:
        raise LookupError("no account")

    await outbox.execute(PlaceOrder(1))
    await exhaust(outbox, clock)

    (issue,) = kept.issues
    (exception,) = issue["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("LookupError", "no account")
    assert exception["stacktrace"]["frames"][-1]["function"] == "pay"
    assert exception["mechanism"] == {"type": "outboxio", "handled": False}
    assert issue["fingerprint"] == ["outboxio", "pay", "LookupError"]
    assert (issue["level"], issue["transaction"]) == ("error", "pay")
    assert issue["tags"] == {
        "outboxio.namespace": "shop",
        "outboxio.shard": "default",
        "outboxio.handler": "pay",
        "outboxio.event_type": "Placed",
        "outboxio.state": "DEAD",
    }
    facts = issue["contexts"]["outboxio"]
    assert (facts["attempt"], facts["action"]) == (3, "PlaceOrder")
    assert not kept.transactions


async def test_an_issue_may_be_created_at_an_earlier_attempt(make: MakeOutbox, clock: MovableClock, init: Init) -> None:
    kept = init(OutboxIntegration(issue_at_attempt=2))
    outbox = await make()

    @outbox.handler(Placed, name="pay", retry=RetryPolicy(max_attempts=4))
    async def pay(envelope: OfPlaced) -> None:
        if envelope.attempt == 3:
            raise RetryAfter(60, count_attempt=False)
        raise LookupError

    await outbox.execute(PlaceOrder(1))
    await exhaust(outbox, clock, 4)

    assert [issue["contexts"]["outboxio"]["attempt"] for issue in kept.issues] == [2]


@pytest.mark.parametrize("wrong", [0, -1, True, "3", 1.5])
def test_an_attempt_that_is_not_a_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a whole number from 1, or None"):
        OutboxIntegration(issue_at_attempt=wrong)


async def test_only_a_failing_hook_of_a_dead_notification_adds_an_issue(
    make: MakeOutbox, clock: MovableClock, init: Init
) -> None:
    kept, broken = init(OutboxIntegration()), [KeyError("hook"), KeyError("hook")]
    outbox = await make()

    async def hook(envelope: EventEnvelope[Any], error: Any) -> None:
        if broken:
            raise broken.pop()

    @outbox.handler(Placed, name="pay", on_dead=hook)
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable("never")

    await outbox.execute(PlaceOrder(1))
    await exhaust(outbox, clock)

    assert [issue["fingerprint"][1:] for issue in kept.issues] == [
        ["pay", "Unprocessable"],
        ["on_dead pay", "KeyError"],
    ]


async def test_an_issue_is_redacted(make: MakeOutbox, init: Init) -> None:
    kept = init(OutboxIntegration())
    outbox = await make(redact=lambda text: text.replace("4711", "****"))

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable("card 4711")

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert kept.issues[0]["exception"]["values"][0]["value"] == "card ****"


async def test_a_batch_that_dies_of_one_error_is_one_issue(make: MakeOutbox, init: Init) -> None:
    kept = init(OutboxIntegration(), traces_sample_rate=1.0)
    outbox = await make()

    @outbox.handler(Placed, name="pay", batch=Batch(size=10))
    async def pay(envelopes: list[OfPlaced]) -> list[Any]:
        return [(envelopes[0], Unprocessable("never"))]

    for order in range(3):
        await outbox.execute(PlaceOrder(order))
    await outbox.drain()

    (span,) = kept.spans("queue.process")
    assert span["data"]["messaging.batch.message_count"] == 3
    assert kept.transactions[-1]["contexts"]["trace"]["status"] == "internal_error"
    assert len(kept.issues) == 1


async def test_a_trace_continues_from_the_request_to_the_run(make: MakeOutbox, clock: MovableClock, init: Init) -> None:
    kept = init(OutboxIntegration(propagate_traces=True), traces_sample_rate=1.0)
    outbox = await make()

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        envelope.emit(Paid(envelope.event.order))

    with sentry_sdk.start_transaction(op="http.server", name="POST /orders"):
        await outbox.execute(PlaceOrder(1))
    clock.advance(timedelta(seconds=2))
    await outbox.drain()

    request, run = kept.transactions
    publish, process = kept.spans("queue.publish")[0], kept.spans("queue.process")[0]
    assert run["contexts"]["trace"]["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert run["contexts"]["trace"]["parent_span_id"] == publish["span_id"]
    assert (run["transaction"], run["contexts"]["trace"]["op"]) == ("pay", "queue.task.outboxio")
    assert run["contexts"]["trace"]["status"] == "ok"
    assert publish["description"] == "Placed"
    assert publish["data"]["messaging.destination.name"] == "Placed"
    common = {"messaging.system", "messaging.destination.name", "messaging.message.id"}
    assert common <= publish["data"].keys() & process["data"].keys()
    assert publish["data"]["messaging.message.id"] == process["data"]["messaging.message.id"]
    assert process["data"]["messaging.message.retry.count"] == 0
    assert process["data"]["messaging.message.receive.latency"] == 2000
    assert [span["description"] for span in kept.spans("queue.publish")] == ["Placed", "Paid"]


async def test_headers_are_stored_on_request_beside_other_headers(
    make: MakeOutbox, sqlite_url: str, init: Init
) -> None:
    init(OutboxIntegration(), traces_sample_rate=1.0)
    outbox = await make()
    with sentry_sdk.start_transaction(name="one"):
        await outbox.execute(PlaceOrder(1), headers={"tenant": "a"})
    init(OutboxIntegration(propagate_traces=True), traces_sample_rate=1.0)
    with sentry_sdk.start_transaction(name="two"):
        await outbox.execute(PlaceOrder(2), headers={"tenant": "a", "baggage": "user=1,sentry-release=old"})

    plain, traced = (msgspec.json.decode(row["headers"]) for row in await Look(sqlite_url).events())
    assert plain == {"tenant": "a"}
    assert traced.keys() == {"tenant", "sentry-trace", "baggage"}
    assert traced["baggage"].startswith("user=1,sentry-trace_id=")
    assert "old" not in traced["baggage"]


async def test_a_run_of_an_unsampled_trace_is_not_a_transaction(make: MakeOutbox, init: Init) -> None:
    kept = init(OutboxIntegration(propagate_traces=True), traces_sample_rate=0.0)
    outbox, called = await make(), list[int]()

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        called.append(envelope.event.order)

    with sentry_sdk.start_transaction(name="request"):
        await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert (called, kept.transactions) == ([1], [])


async def test_spans_can_be_disabled(make: MakeOutbox, init: Init) -> None:
    kept = init(OutboxIntegration(spans=False), traces_sample_rate=1.0)
    outbox = await make()

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable

    with sentry_sdk.start_transaction(name="request"):
        await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert [(t["transaction"], t["spans"]) for t in kept.transactions] == [("request", [])]
    assert len(kept.issues) == 1


async def test_a_tag_set_by_a_handler_stays_in_its_run(make: MakeOutbox, init: Init) -> None:
    kept = init(OutboxIntegration(), traces_sample_rate=1.0)
    outbox = await make(settings=Settings(concurrency=1))

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        if envelope.event.order == 1:
            sentry_sdk.set_tag("order", "1")
        raise Unprocessable

    await outbox.execute(PlaceOrder(1))
    await outbox.execute(PlaceOrder(2))
    await outbox.drain()

    assert [issue["tags"].get("order") for issue in kept.issues] == ["1", None]


async def test_a_client_without_the_integration_gets_nothing(make: MakeOutbox, init: Init) -> None:
    init(OutboxIntegration())
    kept = init(traces_sample_rate=1.0)
    outbox = await make()

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert (kept.issues, kept.transactions) == ([], [])


async def test_the_integration_can_be_combined_with_opentelemetry(make: MakeOutbox, init: Init) -> None:
    kept, traces = init(OutboxIntegration(), traces_sample_rate=1.0), Traces()
    outbox = await make(telemetry=[traces.telemetry(), OutboxIntegration(spans=False)])

    @outbox.handler(Placed, name="pay")
    async def pay(envelope: OfPlaced) -> None:
        raise Unprocessable

    await outbox.execute(PlaceOrder(1))
    await outbox.drain()

    assert (len(kept.issues), kept.transactions) == (1, [])
    assert traces.names == ["execute PlaceOrder", "process Placed", "send Placed"]
