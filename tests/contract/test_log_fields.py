"""The fields of log records, and the fields added to a handler's own records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import anyio
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import outboxio.logs
from outboxio import Batch, EventEnvelope, Outbox, Retry, RetryAfter, RetryPolicy, StaleRecord, Transaction
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}

logger = logging.getLogger("app.shop")


class Records(logging.Handler):
    """The fields of records, as written by a log handler with the filter of outboxio."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(outboxio.logs.Context())
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, name: str) -> list[dict[str, Any]]:
        """Level, message and fields of the records of a logger."""
        return [
            {"level": record.levelname, "message": record.getMessage(), **fields_in(vars(record))}
            for record in self.records
            if record.name == name
        ]


def fields_in(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.startswith("outboxio_")}


@pytest.fixture
def records() -> Iterator[Records]:
    handler, root = Records(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


CLASSIFIER = "outboxio.runs.failure_classifier"


async def once_failed(look: Look) -> dict[str, Any]:
    (row,) = await look.fetch("SELECT id, event_id, event_type FROM {event_notifications}")
    return {
        "outboxio_namespace": "app", "outboxio_shard": "default", "outboxio_handler": "first",
        "outboxio_event_id": str(row["event_id"]), "outboxio_notification_id": str(row["id"]),
        "outboxio_event_type": "MoneyDeposited", "outboxio_action": "Emit", "outboxio_trace_id": TRACE,
        "outboxio_error_type": "ValueError", "outboxio_model_type": "Wallet", "outboxio_model_id": "1",
    }  # fmt: skip


async def test_failures_are_logged_as_warning_then_info_and_finally_error(
    outbox: Outbox, look: Look, clock: MovableClock, records: Records
) -> None:
    no = Journal(lambda envelope: ValueError("no"))
    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=3))(no)
    await outbox.executor.execute(Emit((1,)), headers=HEADERS)
    for _ in range(3):
        await outbox.drain()
        clock.advance(timedelta(hours=1))

    common = await once_failed(look)
    entries = records.of(CLASSIFIER)
    assert [{**entry, "message": ""} for entry in entries] == [
        {"level": "WARNING", "message": "", **common, "outboxio_attempt": 1, "outboxio_state": "FAILED"},
        {"level": "INFO", "message": "", **common, "outboxio_attempt": 2, "outboxio_state": "FAILED"},
        {"level": "ERROR", "message": "", **common, "outboxio_attempt": 3, "outboxio_state": "DEAD"},
    ]
    event = common["outboxio_event_id"]
    assert entries[2]["message"] == f"handler 'first' failed for event {event} (attempt 3, now DEAD): ValueError('no')"
    assert len({record.msg for record in records.records if record.name == CLASSIFIER}) == 1


async def test_expiry_is_an_error_after_a_failure_and_otherwise_a_warning(
    outbox: Outbox, look: Look, clock: MovableClock, records: Records
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError("no")))
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    await look.fetch("UPDATE {event_notifications} SET state = 'PENDING', attempts = 0 WHERE model_id = '2'")
    clock.advance(timedelta(days=8))
    assert (await outbox.drain()).expired == 2

    ends = [entry for entry in records.of(CLASSIFIER) if entry["outboxio_state"] == "EXPIRED"]
    # Both records are rate-limited together: the most severe one represents the others.
    assert [entry["level"] for entry in ends] in (["ERROR"], ["WARNING", "ERROR"], ["ERROR", "WARNING"])
    assert "within the retention; now EXPIRED after 1 attempts" in " ".join(entry["message"] for entry in ends)
    assert all(entry["outboxio_handler"] == "first" and "outboxio_attempt" not in entry for entry in ends)


async def test_retry_after_is_not_logged_as_a_warning(outbox: Outbox, look: Look, records: Records) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: RetryAfter("1h", count_attempt=False)))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    (entry,) = records.of(CLASSIFIER)
    assert (entry["level"], entry["outboxio_error_type"]) == ("INFO", "RetryAfter")


async def test_a_failing_hook_is_logged_as_warning_and_then_info(
    outbox: Outbox, look: Look, clock: MovableClock, records: Records
) -> None:
    async def hook(envelope: EventEnvelope[Any], error: Exception) -> None:
        raise LookupError("no mailbox")

    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1), on_dead=hook)(
        Journal(lambda envelope: ValueError("no"))
    )
    await outbox.executor.execute(Emit((1,)), headers=HEADERS)
    for _ in range(3):
        await outbox.drain()
        clock.advance(timedelta(hours=1))

    entries = [
        (entry["level"], entry["outboxio_state"], entry["outboxio_error_type"]) for entry in records.of(CLASSIFIER)
    ]
    assert entries[0] == ("ERROR", "DYING", "ValueError")
    assert entries[1:3] == [("WARNING", "DYING", "LookupError"), ("INFO", "DYING", "LookupError")]


@pytest.mark.slow
async def test_thousands_of_equal_failures_are_few_lines_with_a_count(
    outbox: Outbox, look: Look, records: Records
) -> None:
    async def no(envelope: EventEnvelope[Any]) -> None:
        raise ConnectionError("the provider is down")

    outbox.handler(MoneyDeposited, name="first")(no)
    outbox.handler(MoneyDeposited, name="second", retry=RetryPolicy(max_attempts=1))(no)
    await outbox.executor.execute(Emit(tuple(range(1_000))))
    began = asyncio.get_running_loop().time()
    drained = await outbox.drain()
    seconds = asyncio.get_running_loop().time() - began

    assert (drained.failed, drained.dead) == (1_000, 1_000)
    for handler, level in (("first", "WARNING"), ("second", "ERROR")):
        entries = [entry for entry in records.of(CLASSIFIER) if entry["outboxio_handler"] == handler]
        assert {entry["level"] for entry in entries} == {level}
        assert len(entries) <= seconds + 2
        assert sum(1 + entry.get("outboxio_suppressed", 0) for entry in entries) == 1_000


async def test_the_failure_of_a_consumed_message_has_the_same_fields(
    outbox: Outbox, look: Look, records: Records
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError("no")))
    await outbox.inbox.consume(
        source="bank", external_id="7", type="MoneyDeposited", payload={"wallet_id": str(UUID(int=1)), "amount": 1},
        headers=HEADERS, on_error="store",
    )  # fmt: skip

    (entry,) = records.of(CLASSIFIER)
    assert (entry["outboxio_namespace"], entry["outboxio_shard"], entry["outboxio_handler"]) == (
        "app", "default", "first",
    )  # fmt: skip
    assert entry["outboxio_trace_id"] == TRACE


async def test_a_retried_action_is_logged_with_its_name_and_shard(outbox: Outbox, look: Look, records: Records) -> None:
    class Stale(Emit):
        async def perform(self, tx: Transaction) -> None:
            if not failures:
                failures.append(1)
                raise StaleRecord("wallets", 1)
            await super().perform(tx)

    failures = list[int]()
    await outbox.executor.execute(Stale((1,)), retry=Retry(on=StaleRecord, delay=0))

    (entry,) = records.of("outboxio.actions.executor")
    assert (entry["outboxio_action"], entry["outboxio_error_type"]) == ("Stale", "StaleRecord")
    assert (entry["outboxio_namespace"], entry["outboxio_shard"]) == ("app", "default")
    assert UUID(entry["outboxio_action_id"])


async def test_log_lines_of_the_loops_name_namespace_and_shard(
    make_outbox: MakeOutbox, database_url: str, records: Records
) -> None:
    outbox = await make_outbox(namespace="shop", database={"eu": database_url})
    outbox.handler(MoneyDeposited, name="first")(Journal())
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()

    entries = records.of("outboxio.runtime.lock_manager")
    assert {entry["outboxio_lock"] for entry in entries} == {"shop/fanout", "shop/dispatch/first"}
    assert {(entry["outboxio_namespace"], entry["outboxio_shard"]) for entry in entries} == {("shop", "eu")}


# --- the handler's own records ---------------------------------------------------------------------


async def test_a_handlers_own_records_name_their_event(outbox: Outbox, look: Look, records: Records) -> None:
    async def write_log(envelope: EventEnvelope[Any]) -> None:
        logger.info("at work")
        logger.info("at home", extra={"outboxio_shard": "mine"})
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(logger.info, "in a thread of a task"))

    outbox.handler(MoneyDeposited, name="first")(write_log)
    await outbox.executor.execute(Emit((1,)), headers=HEADERS)
    logger.info("before")
    await outbox.drain()
    logger.info("after")

    expected = await once_failed(look) | {"outboxio_attempt": 1}
    del expected["outboxio_error_type"]
    before, work, home, thread, after = records.of("app.shop")
    assert fields_in(before) == fields_in(after) == {}
    assert fields_in(work) == fields_in(thread) == expected
    assert fields_in(home) == {**expected, "outboxio_shard": "mine"}


KEYS = {
    "outboxio_model_type": "Wallet", "outboxio_model_id": "7", "outboxio_ordering_key": "wallet-7",
    "outboxio_correlation_id": "req-3",
}  # fmt: skip


async def test_each_record_of_a_run_has_model_key_and_correlation_id(
    outbox: Outbox, look: Look, records: Records
) -> None:
    stale = list[int]()

    class Stale(Emit):
        async def perform(self, tx: Transaction) -> None:
            if not stale:
                stale.append(1)
                raise StaleRecord("wallets", 7)

    async def act(envelope: EventEnvelope[Any]) -> None:
        logger.info("at work")

        await outbox.executor.execute(Stale((1,)), retry=Retry(on=StaleRecord, delay=0))
        raise ValueError("no")

    outbox.handler(MoneyDeposited, name="first", ordered=True)(act)
    async with outbox.transaction("Emit", correlation_id="req-3", headers=HEADERS) as tx:
        tx.emit(MoneyDeposited(UUID(int=7), Decimal(1)), model_type="Wallet", model_id=7, ordering_key="wallet-7")
    await outbox.drain()

    expected = {**await once_failed(look), **KEYS}
    of_handler, of_action, of_run = (
        fields_in(records.of(name)[0]) for name in ("app.shop", "outboxio.actions.executor", CLASSIFIER)
    )
    assert of_run == {**expected, "outboxio_attempt": 1, "outboxio_state": "FAILED"}
    assert of_handler == {key: value for key, value in of_run.items() if key not in FAILURE}
    assert of_action == {
        **of_handler, "outboxio_action": "Stale", "outboxio_action_id": of_action["outboxio_action_id"],
        "outboxio_error_type": of_action["outboxio_error_type"],
    }  # fmt: skip


FAILURE = ("outboxio_error_type", "outboxio_state")


async def test_threaded_and_transactional_handlers_have_the_same_log_fields(
    outbox: Outbox, look: Look, records: Records
) -> None:
    def in_thread(envelope: EventEnvelope[Any]) -> None:
        logger.info("%s", envelope.attempt)
        anyio.from_thread.run_sync(logger.info, "in the loop")

    async def in_transaction(envelope: EventEnvelope[Any]) -> None:
        logger.info("%s", envelope.attempt)

    outbox.handler(MoneyDeposited, name="first")(in_thread)
    outbox.handler(MoneyDeposited, name="second", delivery="transactional")(in_transaction)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    entries = records.of("app.shop")
    assert sorted(entry["outboxio_handler"] for entry in entries) == ["first", "first", "second"]
    assert len({entry["outboxio_event_id"] for entry in entries}) == 1


async def test_batch_records_have_the_event_count_and_no_event(outbox: Outbox, look: Look, records: Records) -> None:
    async def many(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        logger.info("%d at once", len(envelopes))

    outbox.handler(MoneyDeposited, name="many", batch=Batch(size=10))(many)
    await outbox.executor.execute(Emit((1, 2, 3)))
    await outbox.drain()

    (entry,) = records.of("app.shop")
    assert fields_in(entry) == {
        "outboxio_namespace": "app", "outboxio_shard": "default", "outboxio_handler": "many", "outboxio_batch_size": 3,
    }  # fmt: skip


async def test_a_row_under_an_alias_is_logged_under_its_handler(
    make_outbox: MakeOutbox, clock: MovableClock, records: Records
) -> None:
    before, after = await make_outbox(clock=clock), await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="old")(Journal(lambda envelope: ValueError("no")))
    await before.executor.execute(Emit((1,)))
    await before.drain()

    async def write_log(envelope: EventEnvelope[Any]) -> None:
        logger.info("at work")
        raise LookupError

    after.handler(MoneyDeposited, name="new", aliases={"old"})(write_log)
    clock.advance(timedelta(hours=1))
    await after.drain()

    assert {entry["outboxio_handler"] for entry in records.of("app.shop")} == {"new"}
    assert {entry["outboxio_handler"] for entry in records.of(CLASSIFIER)} == {"old", "new"}


async def test_a_task_that_outlives_its_handler_has_no_run_fields(outbox: Outbox, look: Look, records: Records) -> None:
    go_on, tasks = asyncio.Event(), list[asyncio.Task[None]]()

    async def late() -> None:
        logger.info("early")
        await go_on.wait()
        logger.info("late")

    async def spawn(envelope: EventEnvelope[Any]) -> None:
        tasks.append(asyncio.create_task(late()))
        await asyncio.sleep(0)

    outbox.handler(MoneyDeposited, name="first")(spawn)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    go_on.set()
    await tasks[0]

    early, late_one = records.of("app.shop")
    assert early["outboxio_handler"] == "first"
    assert fields_in(late_one) == {}


async def test_the_trace_fields_come_from_opentelemetrys_current_span(
    outbox: Outbox, look: Look, records: Records
) -> None:
    tracer = TracerProvider().get_tracer("tests")
    spans = list[trace.Span]()

    async def write_log(envelope: EventEnvelope[Any]) -> None:
        logger.info("without")
        with tracer.start_as_current_span("work") as span:
            spans.append(span)
            logger.info("within")

    outbox.handler(MoneyDeposited, name="first")(write_log)
    await outbox.executor.execute(Emit((1,)), headers=HEADERS)
    with tracer.start_as_current_span("start") as started:
        async with outbox.running():
            started.end()  # workers inherit a span that has ended
            await outbox.drain()

    without, within = records.of("app.shop")
    assert without["outboxio_trace_id"] == TRACE
    assert within["outboxio_trace_id"] == f"{spans[0].get_span_context().trace_id:032x}"


async def test_structlog_entries_of_a_handler_have_the_same_fields(outbox: Outbox, look: Look) -> None:
    written = list[dict[str, Any]]()

    def keep(logger: object, name: str, event: Any) -> Any:
        written.append(dict(event))
        raise structlog.DropEvent

    log = structlog.wrap_logger(None, processors=[outboxio.logs.structlog_context, keep])

    async def write_log(envelope: EventEnvelope[Any]) -> None:
        log.info("at work", amount=1)
        log.info("at home", outboxio_shard="mine")

    outbox.handler(MoneyDeposited, name="first")(write_log)
    await outbox.executor.execute(Emit((1,)), headers=HEADERS)
    await outbox.drain()
    log.info("after")

    expected = await once_failed(look) | {"outboxio_attempt": 1}
    del expected["outboxio_error_type"]
    assert written == [
        {"event": "at work", "amount": 1, **expected},
        {"event": "at home", **expected, "outboxio_shard": "mine"},
        {"event": "after"},
    ]
