"""An operator cancels a run: the attempt fails with the reason, and the result describes what happened to the run."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import (
    Batch,
    CancelledByOperator,
    ConfigurationError,
    EventEnvelope,
    Filter,
    HandlerFailed,
    NotificationRecord,
    Operation,
    Outbox,
    RetryPolicy,
    Settings,
    Unavailable,
    Unprocessable,
)
from outboxio.operations import cancelling
from outboxio.runs import handler_queue
from outboxio.runs.run import Run
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, hang, turns
from tests.kit.inside import database_of, dispatcher_of, run_of
from tests.kit.marks import needs_many_writers
from tests.kit.probes import add_wallet, balances
from tests.kit.spies import counters

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]

WHY: dict[str, Any] = {"actor": "ada", "reason": "the bank is closed"}
ERROR = ("CancelledByOperator", "cancelled by ada: the bank is closed")
QUICK = Settings(shutdown_timeout="100ms", fanout_poll_delay="30ms", handling_poll_delay="30ms")
LATER = RetryPolicy(base="1h")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy process may need longer than usual to report a run, or its end."""
    monkeypatch.setattr(cancelling, "PATIENCE", 60.0)
    monkeypatch.setattr(cancelling, "PATIENCE_FOR_END", 60.0)


class Hanging(Journal):
    """A handler whose first calls never finish."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self._calls = calls

    async def __call__(self, envelope: Any) -> None:
        await super().__call__(envelope)
        if len(self) <= self._calls:
            await hang()


async def records(outbox: Outbox) -> dict[str, NotificationRecord]:
    """The notifications by model id."""
    return {str(record.model_id): record for record in await outbox.admin.list()}


async def cancelled(outbox: Outbox, model_id: str = "1") -> Operation:
    """Cancel the run of a notification, and return the operation."""
    record = (await records(outbox))[model_id]
    return await outbox.admin.cancel(record.id, **WHY)


def numbers(operation: Operation) -> tuple[str, int, int, int]:
    return str(operation.state), operation.matched, operation.done, operation.refused


def last_error(record: NotificationRecord) -> tuple[Any, Any]:
    return record.errors[-1]["type"], record.errors[-1]["message"]


# --- what happens to the run -----------------------------------------------------------------------


async def test_a_cancelled_attempt_fails_with_actor_and_reason(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail", retry=LATER)(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        operation = await cancelled(outbox)

        assert (numbers(operation), operation.error) == (("DONE", 1, 1, 0), None)
        assert (operation.kind, operation.actor, operation.reason) == ("cancel", "ada", "the bank is closed")
        record = (await records(outbox))["1"]
        assert (record.state, record.attempts, last_error(record)) == ("FAILED", 1, ERROR)
        assert await outbox.admin.operation(operation.id) == operation


async def test_the_retry_policy_decides_about_a_cancelled_run(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="1ms"))(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        assert (await cancelled(outbox)).done == 1
        await journal.calls(2)
        await outbox.drain()

        record = (await records(outbox))["1"]
        assert (record.state, record.attempts, len(journal)) == ("SUCCEEDED", 2, 2), "the retry is not cancelled"


@needs_many_writers
async def test_a_cancelled_transaction_is_rolled_back(make_outbox: MakeOutbox, wallets_table: None, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="ledger", delivery="transactional", retry=LATER)
    async def handle(envelope: Envelope) -> None:
        await add_wallet(envelope.tx, str(uuid4()), 7)
        started.set()
        await hang()

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
        assert (await cancelled(outbox)).done == 1

        record = (await records(outbox))["1"]
        assert (record.state, record.attempts, last_error(record)) == ("FAILED", 1, ERROR)
        assert await balances(look) == []


async def test_a_cancelled_batch_call_fails_all_events_without_a_split(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    calls: list[int] = []
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="export", batch=Batch(size=3, max_wait="1h"), retry=LATER)
    async def handle(envelopes: list[Envelope]) -> None:
        calls.append(len(envelopes))
        started.set()
        await hang()

    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2, 3)))
        await started.wait()
        operation = await cancelled(outbox, "2")

        assert numbers(operation) == ("DONE", 3, 3, 0)
        rows = await records(outbox)
        assert {(row.state, row.attempts, last_error(row)) for row in rows.values()} == {("FAILED", 1, ERROR)}
        assert calls == [3]


async def test_a_cancelled_run_of_an_at_most_once_handler_is_dead(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail", delivery="at_most_once")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        assert (await cancelled(outbox)).done == 1
        record = (await records(outbox))["1"]
        assert (record.state, last_error(record)) == ("DEAD", ERROR)


async def test_after_a_cancelled_last_attempt_the_hook_gets_the_error(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal, notified = Hanging(), asyncio.Queue[tuple[str, str]]()

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        notified.put_nowait((error.type, error.message))

    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(max_attempts=1), on_dead=hook)(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        assert (await cancelled(outbox)).done == 1
        assert await notified.get() == ERROR


@needs_many_writers
async def test_a_cancelled_hook_runs_again_and_the_outcome_stands(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    started = asyncio.Event()

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        started.set()
        await hang()

    outbox.handler(MoneyDeposited, name="mail", on_dead=hook)(Journal(lambda envelope: Unprocessable("no")))
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
        assert (await cancelled(outbox)).done == 1
        record = (await records(outbox))["1"]
        assert (record.state, record.attempts, last_error(record)) == ("DYING", 1, ERROR)


async def test_a_key_waits_for_the_retry_of_its_cancelled_head(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, retry=LATER)(journal)
    async with outbox.running():
        async with outbox.transaction("Deposits") as tx:
            for number in (1, 2):
                tx.emit(MoneyDeposited(uuid4(), number), model_id=number, model_type="Wallet", ordering_key="ada")
        await journal.calls(1)
        assert (await cancelled(outbox, "1")).done == 1
        blocked = await cancelled(outbox, "2")
        assert numbers(blocked) == ("DONE", 1, 0, 1)
        assert "waits behind" in (blocked.error or "") or "queued" in (blocked.error or "")
        assert journal.amounts == [1]


@pytest.mark.parametrize("ending", ["returns", "raises", "reports an unavailable service"])
async def test_a_handler_cannot_change_the_outcome_of_a_cancelled_run(make_outbox: MakeOutbox, ending: str) -> None:
    outbox = await make_outbox(settings=QUICK)
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="mail", retry=LATER)
    async def handle(envelope: Envelope) -> None:
        started.set()
        try:
            await hang()
        except asyncio.CancelledError:
            if ending == "raises":
                raise Unprocessable("never") from None
            if ending != "returns":
                raise Unavailable("the bank") from None

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
        assert (await cancelled(outbox)).done == 1
        record = (await records(outbox))["1"]
        assert (record.state, record.attempts, last_error(record)) == ("FAILED", 1, ERROR)


async def test_a_run_continues_after_a_skip_and_can_be_cancelled(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        await outbox.admin.skip([(await records(outbox))["1"].id])
        assert (await cancelled(outbox)).done == 1
        assert (await records(outbox))["1"].state == "SKIPPED"


async def test_the_result_follows_the_write_of_the_failed_attempt(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox(settings=QUICK)
    started, ended, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="mail", retry=LATER)
    async def handle(envelope: Envelope) -> None:
        started.set()
        try:
            await hang()
        finally:
            ended.set()

    notifications = database_of(outbox).notifications
    settle = notifications.settle

    async def settle_later(*args: Any) -> Any:
        await gate.wait()
        return await settle(*args)

    monkeypatch.setattr(notifications, "settle", settle_later)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
        call = asyncio.ensure_future(cancelled(outbox))
        await ended.wait()
        for _ in range(3):
            await run_of(outbox).announce()
        [operation] = await outbox.admin.operations()
        assert (operation.state, call.done()) == ("RUNNING", False)
        gate.set()
        assert (await call).done == 1


async def test_a_process_with_runs_reads_operations_within_a_second(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(notify=False, shutdown_timeout="100ms"))
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail")(journal)
    async with outbox.running():
        run = run_of(outbox)
        await outbox.drain()
        idle = await run.announce()
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        busy = await run.announce()
        assert (idle.again_in, busy.again_in < 1) == (float("inf"), True), "one of these rounds cancels the run"


@pytest.mark.parametrize(
    "options",
    [{}, {"delivery": "transactional"}, {"batch": Batch(size=4, max_wait="10ms")}, {"ordered": True}],
    ids=["plain", "transactional", "batch", "ordered"],
)
async def test_cancelling_at_any_point_loses_no_notification(make_outbox: MakeOutbox, options: dict[str, Any]) -> None:
    outbox = await make_outbox(settings=QUICK)
    error, chances, hits = CancelledByOperator("ada", None), random.Random(7), list[UUID]()

    @outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="1ms", factor=1), **options)
    async def handle(envelopes: Any) -> None:
        for _ in range(chances.randrange(100)):
            await asyncio.sleep(0)
        for envelope in envelopes if isinstance(envelopes, list) else [envelopes]:
            envelope.emit(WalletOpened(uuid4()), model_id=str(envelope.notification_id))

    async def have_succeeded() -> bool:
        return {str(row.state) for row in (await records(outbox)).values()} == {"SUCCEEDED"}

    async with outbox.running():
        dispatcher = dispatcher_of(outbox)
        await outbox.executor.execute(Emit(tuple(range(60))))
        while len(hits) < 60 and not (hits and not dispatcher.rows):
            await turns(chances.randrange(1, 12))
            for id in chances.sample(list(dispatcher.rows), k=min(2, len(dispatcher.rows))):
                if isinstance(run := dispatcher.cancel(id, error), Run) and run.cancelled_by is error:
                    hits += [row.notification.id for row in run.called]
        await eventually(have_succeeded)
        assert hits

        rows = await records(outbox)
        assert {row.id for row in rows.values() if row.attempts > 1} <= set(hits)
        assert {entry["type"] for row in rows.values() for entry in row.errors} == {"CancelledByOperator"}
        emitted = await outbox.admin.events(Filter(event_type="WalletOpened"), limit=1000)
        assert Counter(event.model_id for event in emitted) == Counter(str(row.id) for row in rows.values())


# --- a run that cannot be cancelled, or does not end ----------------------------------------------


async def test_a_synchronous_handler_is_not_cancelled_and_the_result_reports_it(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    started, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @outbox.handler(MoneyDeposited, name="report")
    def handle(envelope: Envelope) -> None:
        loop.call_soon_threadsafe(started.set)
        assert gate.wait(60)

    try:
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await started.wait()
            operation = await cancelled(outbox)
            assert numbers(operation) == ("DONE", 1, 0, 1)
            assert "a plain function, which runs in a thread, and Python cannot interrupt a thread" in (
                operation.error or ""
            )
            gate.set()
            await outbox.drain()
            record = (await records(outbox))["1"]
            assert (record.state, record.errors) == ("SUCCEEDED", []), "the run was not cancelled"
    finally:
        gate.set()


async def test_a_run_that_ignores_its_cancellation_is_stuck(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_queue, "LONGEST_GRACE", 0.3)
    outbox = await make_outbox(settings=QUICK)
    started, gate = asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="stubborn", retry=LATER)
    async def handle(envelope: Envelope) -> None:
        started.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    try:
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await started.wait()
            operation = await cancelled(outbox)
            assert numbers(operation) == ("DONE", 1, 1, 0)
            assert "handler 'stubborn' ignores its cancellation" in (operation.error or "")
            assert counters(outbox).stuck == 1
            gate.set()
            await eventually(lambda: outbox.statistics["default"].handlers["stubborn"].stuck == 0)
            record = (await records(outbox))["1"]
            assert (record.state, record.attempts, last_error(record)) == ("FAILED", 1, ERROR)
            assert "gate.wait()" in str(record.errors[-1]["traceback"])
    finally:
        gate.set()


# --- no run in progress ----------------------------------------------------------------------------


async def test_a_queued_notification_is_not_cancelled(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail", concurrency=1)(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await journal.calls(1)
        operation = await cancelled(outbox, "2" if journal.amounts == [1] else "1")
        assert numbers(operation) == ("DONE", 1, 0, 1)
        assert "no run of the notification is in progress: it is queued" in (operation.error or "")


async def test_a_finished_or_delayed_notification_gets_a_result_at_once(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail", retry=LATER)(
        Journal(lambda envelope: ValueError("no") if envelope.event.amount == 2 else None)
    )
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    for model_id, expected in (("1", "has finished: it is SUCCEEDED"), ("2", "is not due before")):
        operation = await cancelled(outbox, model_id)
        assert numbers(operation) == ("DONE", 1, 0, 1)
        assert expected in (operation.error or "")
        assert await outbox.admin.operation(operation.id) == operation, "it is recorded like any other"


async def test_without_a_process_the_result_says_it_is_not_running(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "PATIENCE", 0.05)
    outbox.handler(MoneyDeposited, name="mail")(Journal(lambda envelope: ValueError("no")))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.admin.retry([(await records(outbox))["1"].id])
    operation = await cancelled(outbox)
    assert numbers(operation) == ("DONE", 1, 0, 1)
    assert "no process has reported a run" in (operation.error or "")
    assert (await records(outbox))["1"].state == "PENDING"


async def test_an_old_operation_does_not_cancel_a_later_run(make_outbox: MakeOutbox, clock: Any) -> None:
    outbox = await make_outbox(settings=QUICK, clock=clock)
    journal = Hanging()
    outbox.handler(MoneyDeposited, name="mail")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        record = (await records(outbox))["1"]
        # Private, because no public call leaves the row of a process that has died.
        recorder, [one] = outbox.admin._recorder, outbox.admin._shards.chosen(None)  # pyright: ignore[reportPrivateUsage]
        cancel_request = recorder.request("cancel", {"ids": [str(record.id)]}, None, None)
        abandoned = await recorder.begin(cancel_request, one, "a process that has died")
        clock.advance(timedelta(seconds=11))
        operation = await cancelled(outbox)
        assert operation.done == 1
        assert (await records(outbox))["1"].errors[-1]["message"] == ERROR[1], "not the reason of the old operation"
        found = await outbox.admin.operation(abandoned.id)
        assert found is not None
        assert not found.has_ended


async def test_cancelling_the_call_stops_the_operation(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal(lambda envelope: ValueError("no")))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.admin.retry([(await records(outbox))["1"].id])
    call = asyncio.ensure_future(cancelled(outbox))

    async def operations() -> list[str]:
        return [one.state for one in await outbox.admin.operations() if one.kind == "cancel"]

    async def is_waiting() -> bool:
        return await operations() == ["RUNNING"]

    await eventually(is_waiting)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await operations() == ["STOPPED"]


async def test_only_a_notification_can_be_cancelled(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    record = (await records(outbox))["1"]
    for id, expected in (
        (uuid4(), "there is no notification"),
        (record.event_id, rf"is an event; pass the id of one of its notifications: {record.id} \(mail\)"),
        ("nonsense", "'nonsense' is not the id"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            await outbox.admin.cancel(id)
    assert await outbox.admin.operations() == []
