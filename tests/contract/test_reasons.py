"""Why unfinished notifications have not run: each has a reason, as a count and as text, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from outboxio import Batch, Event, Outbox, RetryPolicy, UnknownHandler
from outboxio.health.facts import HandlerFacts, HandlerReport, InstanceFacts, Report, ShardFacts
from outboxio.health.reasons import Reason, reason_of, waiting_in
from outboxio.model.notification import FIRST_DEFERRED, State
from outboxio.storage.protocols import InstanceReport
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, MoneyDeposited, eventually
from tests.kit.inside import clock_of, database_of, fresh_overview, shard_of
from tests.kit.spies import Gate, counters

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MakeOutbox = Callable[..., Awaitable[Outbox]]
NOTHING: dict[str, int] = {reason.value: 0 for reason in Reason}


async def reasons(outbox: Outbox, handler: str | None = None) -> dict[str, int]:
    """The reasons with rows. Their sum is the number of unfinished rows."""
    found = await outbox.admin.waiting(handler)
    assert found.keys() == NOTHING.keys()
    if handler is None:
        counts = await outbox.admin.counts()
        assert sum(found.values()) == sum(counts[state] for state in ("PENDING", "FAILED", "BLOCKED", "DYING"))
    return {reason: number for reason, number in found.items() if number}


async def sentences(outbox: Outbox, **wanted: Any) -> set[str | None]:
    rows = await outbox.admin.list(**wanted)
    await fresh_overview(outbox)
    return {(await outbox.admin.inspect(row.id)).reason for row in rows}


async def reports(outbox: Outbox, **handlers: dict[str, Any]) -> None:
    """Let a process in ``running()`` report this about its handlers."""
    now = clock_of(outbox)()
    content = msgspec.Raw(msgspec.json.encode({"roles": ["handling"], "handlers": handlers}))
    report = InstanceReport(
        instance="host:1:a", version="1", started_date=now, last_seen_date=now, delay_seconds=10, report=content
    )
    await database_of(outbox).reports.write_report("app", report)


async def test_nothing_waits_in_an_empty_outbox(outbox: Outbox) -> None:
    assert await outbox.admin.waiting() == NOTHING
    assert (await fresh_overview(outbox)).figures.reasons == NOTHING


async def test_finished_notifications_have_no_reason(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert await reasons(outbox) == {}
    assert await sentences(outbox) == {None}


async def test_a_running_row_is_reported_as_queued(outbox: Outbox) -> None:
    gate = Gate()
    outbox.handler(MoneyDeposited, name="mail", concurrency=1)(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(1)
        await eventually(lambda: outbox.admin.list("PENDING"))
        assert await reasons(outbox) == {"queued": 2}
        assert await sentences(outbox) == {"Due since 2030-01-01 12:00:00 UTC: queued or running."}
        gate.open()


async def test_rows_wait_for_a_retry_or_behind_their_keys_head(outbox: Outbox) -> None:
    journal = Journal(lambda envelope: ValueError("no"))
    outbox.handler(MoneyDeposited, name="mail", ordered=True, retry=RetryPolicy(base="1m", jitter=0))(journal)
    async with outbox.transaction("Pay") as tx:
        for amount in range(3):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="k1")
    async with outbox.running():
        await eventually(lambda: counters(outbox).failed == 1)
        await eventually(lambda: _counts(outbox, BLOCKED=2))
        assert await reasons(outbox) == await reasons(outbox, "mail") == {"retry": 1, "blocked": 2}
        [head] = await outbox.admin.list("FAILED")
        retry = "Waits for its retry at 2030-01-01 12:01:00 UTC, after attempt 1 failed."
        assert await sentences(outbox, state="FAILED") == {retry}
        assert await sentences(outbox, state="BLOCKED") == {
            f"Waits behind `{head.id}`, the first of key `k1`. That one: {retry}"
        }


async def _counts(outbox: Outbox, **wanted: int) -> bool:
    counts = await outbox.admin.counts()
    return all(counts[state] == number for state, number in wanted.items())


async def test_a_parked_key_names_the_notification_that_parks_it(outbox: Outbox) -> None:
    journal = Journal(lambda envelope: ValueError("no"))
    outbox.handler(MoneyDeposited, name="mail", ordered=True, retry=RetryPolicy(max_attempts=1))(journal)
    async with outbox.transaction("Pay") as tx:
        for amount in range(2):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="k1")
    await outbox.drain()
    [dead] = await outbox.admin.list("DEAD")
    assert await sentences(outbox, state="BLOCKED") == {
        f"Waits behind `{dead.id}`, the first of key `k1`. It ended DEAD: retry or skip it."
    }


async def test_an_event_available_later_is_delayed(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    async with outbox.transaction("Pay") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)), available_at=clock.now() + timedelta(hours=2))
    await outbox.drain()
    assert await reasons(outbox) == {"delayed": 1}
    assert await sentences(outbox) == {"Delayed until 2030-01-01 14:00:00 UTC."}


async def test_events_of_a_scheduled_batch_wait_for_the_schedule(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 15 * * *"))(Journal())
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    await reports(outbox, report={"schedule": "0 15 * * *"})
    assert await reasons(outbox) == {"schedule": 2}
    [text] = await sentences(outbox)
    assert text == "Waits for the schedule of `report`, `0 15 * * *`: next at 2030-01-01 15:00:00 UTC."


async def test_rows_of_a_paused_handler_wait_for_an_operator(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.drain()
    await outbox.admin.pause("mail")
    await outbox.executor.execute(Emit((1, 2)))
    async with outbox.running():
        await eventually(lambda: _counts(outbox, PENDING=2))
        assert await reasons(outbox) == {"paused": 2}
        assert await sentences(outbox) == {"`mail` is paused: `outboxio unpause mail` resumes it."}


async def test_rows_without_a_process_wait_for_an_owner_then_a_handler(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone, other = await make_outbox(clock=clock), await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="1h", jitter=0))(
        Journal(lambda envelope: ValueError("no") if envelope.event.amount == 1 else None)
    )
    await gone.executor.execute(Emit((1,)))
    await gone.drain()
    async with gone.running(handling=False):
        await gone.executor.execute(Emit((2,)))
        await eventually(lambda: _counts(gone, PENDING=1))
    assert await reasons(gone) == {"no_owner": 1, "retry": 1}
    assert "Due since 2030-01-01 12:00:00 UTC: no process holds partition 0 of `mail`." in await sentences(gone)

    clock.advance("4m")
    other.handler(MoneyDeposited, name="other", since="now")(Journal())
    await other.drain()
    assert await reasons(other) == {"no_handler": 2}
    assert await sentences(other) == {
        "No process has a handler `mail`: deploy it, or add `aliases={'mail'}` to its successor."
    }


async def test_a_deferred_row_names_its_version(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    class Made(Event, type_name="Made"):
        number: int

    class MadeNewer(Event, type_name="Made", version=2):
        number: int

    web, worker = await make_outbox(clock=clock), await make_outbox(clock=clock)
    worker.handler(Made, name="mail")(Journal())
    async with web.transaction("Make") as tx:
        tx.emit(MadeNewer(1), model_id=1)
    await worker.drain()
    assert await reasons(worker) == {"version": 1}
    assert await sentences(worker) == {"Waits for version 2 of `Made`: deploy the newer code to the workers of `mail`."}


async def test_reports_of_a_process_explain_its_due_rows(outbox: Outbox) -> None:
    gate = Gate()
    outbox.handler(MoneyDeposited, name="mail")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        due = "Due since 2030-01-01 12:00:00 UTC: "
        for report, reason, text in (
            ({"limited_to": "5/s"}, "rate", f"{due}`mail` is limited to 5/s."),
            (
                {"rest": {"since": "2030-01-01T12:00:00", "reason": "the mail server is away"}}, "unavailable",
                "The circuit breaker of `mail` is open: the mail server is away.",
            ),
            ({"max_wait": 60.0}, "batch", f"{due}`mail` waits up to 60 s for a full batch."),
        ):  # fmt: skip
            await reports(outbox, mail=report)
            assert (await reasons(outbox), await sentences(outbox)) == ({reason: 1}, {text})
        gate.open()


async def test_rows_under_an_alias_count_once_during_a_deployment(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    old, new = await make_outbox(clock=clock), await make_outbox(clock=clock)
    old.handler(MoneyDeposited, name="old")(Journal())
    new.handler(MoneyDeposited, name="new", aliases={"old"})(Journal())
    await old.drain()
    await new.drain()
    async with old.running(handling=False):
        await old.executor.execute(Emit((1, 2, 3)))
        await eventually(lambda: _counts(old, undelivered=0))
    assert await reasons(old) == {"no_owner": 3}
    assert await reasons(new) == {"no_owner": 3}


async def test_rows_under_a_former_name_have_its_successors_reason(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    old, new = await make_outbox(clock=clock), await make_outbox(clock=clock)
    old.handler(MoneyDeposited, name="old")(Journal())
    new.handler(MoneyDeposited, name="new", aliases={"old"})(Journal())
    await old.drain()
    async with old.running(handling=False):
        await old.executor.execute(Emit((1, 2)))
        await eventually(lambda: _counts(old, undelivered=0))
    clock.advance("4m")
    await new.drain()
    await new.admin.pause("new")
    await old.admin.retry([row.id for row in await old.admin.list()])
    assert await reasons(new) == {"paused": 2}
    assert [one.handler_name for one in (await fresh_overview(new)).handlers] == ["new"]


async def test_the_first_process_after_an_outage_expects_the_others(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    mail, ledger = await make_outbox(clock=clock), await make_outbox(clock=clock)
    mail.handler(MoneyDeposited, name="mail")(Journal())
    ledger.handler(MoneyDeposited, name="ledger")(Journal())
    await ledger.drain()
    async with ledger.running(handling=False):
        await ledger.executor.execute(Emit((1,)))
        await eventually(lambda: _counts(ledger, undelivered=0))
    clock.advance("1h")
    async with mail.running():
        await eventually(lambda: _reports_of(mail))
        assert await reasons(mail, "ledger") == {"no_owner": 1}


async def _reports_of(outbox: Outbox) -> bool:
    return bool((await fresh_overview(outbox)).instances)


async def test_an_unknown_handler_is_refused_by_name(outbox: Outbox) -> None:
    with pytest.raises(UnknownHandler, match="mial"):
        await outbox.admin.waiting("mial")


async def test_row_counts_beyond_the_overview_limit_are_exact(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.drain()
    async with outbox.running(handling=False):
        await outbox.executor.execute(Emit(tuple(range(25))))
        await eventually(lambda: _counts(outbox, PENDING=25))
    bounded = await shard_of(outbox).collector().rows_and_locks(clock_of(outbox)(), most=4)
    assert waiting_in(bounded) == {"mail": {Reason.NO_OWNER: 4}}
    assert await reasons(outbox) == {"no_owner": 25}


# --- the function --------------------------------------------------------------------------------


NOW = datetime(2030, 1, 1)
HELD = HandlerFacts(name="mail", oldest_due=NOW)


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED, State.BLOCKED, State.DYING])
@pytest.mark.parametrize("due", [NOW, NOW + timedelta(days=900), FIRST_DEFERRED])
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    "handler", [None, HELD, HandlerFacts(name="mail", is_gone=True), HandlerFacts(name="mail", paused_since=NOW)]
)
@pytest.mark.parametrize("report", [HandlerReport(), HandlerReport(1, 1), HandlerReport(limited_to="1/s")])
def test_every_unfinished_row_has_exactly_one_reason(
    state: State, due: datetime, is_held: bool, handler: HandlerFacts | None, report: HandlerReport
) -> None:
    worker = InstanceFacts(
        instance="a", version="1", started=NOW, last_seen=NOW, is_alive=True, report=Report(handlers={"mail": report})
    )
    shard = ShardFacts(name="default", now=NOW, instances=[worker])
    assert isinstance(reason_of(state, due, handler, shard, is_held=is_held), Reason)
