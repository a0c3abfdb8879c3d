"""What is recorded after the holder of a handler's lock has died, which rows then run alone, and which end DEAD.

The dead process is a row of ``leases`` here, and the runs it had started are rows of ``started_runs``; for real
processes see ``tests/flow/test_crash_poison.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest

from outboxio import Batch, EventEnvelope, HandlerFailed, Outbox, RetryPolicy, Settings
from outboxio.dispatch import dispatcher
from outboxio.storage.protocols import StartedRun
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import database_of, poison_guard_of
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import MakeOutbox
from tests.kit.spies import Gate, breaks, counters, deposits, watch
from tests.kit.storage import NOW
from tests.kit.wire import Wire, watched

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

QUICK = Settings(handling_poll_delay="20ms", fanout_poll_delay="20ms", purge_enabled=False)


@pytest.fixture
def wire(database_url: str) -> Iterator[Wire]:
    """Records every message of the test; created before any connection."""
    with watched(keeps_texts=True) as wire:
        yield wire


async def die(look: Look, *names: str, namespace: str = "app") -> None:
    """A process held the locks of these names, and never released them."""
    for name in names:
        await look.fetch(
            f"INSERT INTO {{leases}} VALUES ('{namespace}/dispatch/{name}', 1, 'dead', '2030-01-01 12:00:00', 0)"
        )


async def suspect(outbox: Outbox, name: str, *amounts: int, starts: int = 1) -> None:
    """A process that had started these runs died. An outbox without the handler fans the rows out."""
    rows = [row for row in await outbox.admin.list(handler=name, limit=1000) if int(row.model_id or -1) in amounts]
    assert len(rows) == len(amounts)
    runs = [StartedRun(row.id, name, starts) for row in rows]
    await database_of(outbox).starts.record(outbox.namespace, runs, NOW + timedelta(days=1))


async def insert_notifications(outbox: Outbox, events: int) -> None:
    """Fan events out for the handlers of an outbox, without running the handlers."""
    await deposits(outbox, events)
    async with outbox.running(handling=False):
        await eventually(lambda: _is_fanned_out(outbox))


async def _is_fanned_out(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["undelivered"] == 0


async def records(look: Look) -> int:
    return int(await look.value("SELECT count(*) FROM {started_runs}"))


class Alone(Journal):
    """A handler that counts concurrent runs of its own and of its siblings."""

    def __init__(self, inside: list[int], meeting: Mapping[int, asyncio.Barrier] | None = None) -> None:
        """``meeting``: where the run of an amount waits for the others."""
        super().__init__()
        self.inside = inside
        self.meeting = dict(meeting or {})
        self.beside: dict[int, set[int]] = {}

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        amount = int(envelope.event.amount)
        self.inside.append(amount)
        beside = self.beside.setdefault(amount, set())
        try:
            await super().__call__(envelope)
            for _ in range(10):
                beside.update(self.inside)
                await (asyncio.sleep(0.001) if (meeting := self.meeting.pop(amount, None)) is None else meeting.wait())
        finally:
            self.inside.remove(amount)
            beside.discard(amount)


# --- what is recorded ----------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_after_a_crash_a_run_is_recorded_while_it_lasts(outbox: Outbox, look: Look, delivery: str) -> None:
    seen: list[int] = []

    @outbox.handler(MoneyDeposited, name="mail", delivery=delivery)
    async def mail(envelope: EventEnvelope[MoneyDeposited]) -> None:
        seen.append(int(await look.value("SELECT count(*) FROM {started_runs}")))

    await die(look, "mail")
    await deposits(outbox, 20)
    drained = await outbox.drain()

    assert (drained.succeeded, min(seen) >= 1) == (20, True)
    assert await records(look) == 0


@needs_asyncpg
async def test_a_batch_is_recorded_whole_and_at_once(wire: Wire, outbox: Outbox, look: Look) -> None:
    seen: list[int] = []

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=50))
    async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        seen.append(int(await look.value("SELECT count(*) FROM {started_runs}")))

    await die(look, "report")
    await deposits(outbox, 50)
    assert (await outbox.drain()).succeeded == 50

    assert seen == [50]
    assert await records(look) == 0
    assert len(recorded_by(wire)) == 1


def recorded_by(wire: Wire) -> list[str]:
    return [text for text in about_crashes(wire) if "INSERT" in text]


def about_crashes(wire: Wire) -> list[str]:
    return [text for text in wire.texts if "started_runs" in text and "CREATE" not in text]


@needs_asyncpg
async def test_runs_that_start_together_are_recorded_together(wire: Wire, make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await die(look, "mail")
    await deposits(outbox, 500)

    assert (await outbox.drain()).succeeded == 500
    assert 1 <= len(recorded_by(wire)) <= 60


async def test_after_a_clean_exit_nothing_is_read_or_written(wire: Wire, make_outbox: MakeOutbox, look: Look) -> None:
    """Neither by the first process, nor in its next running block."""
    for owner in ("first", "second", "second"):
        outbox = await make_outbox(settings=QUICK)
        outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
        for _ in range(1 + (owner == "second")):
            before = len(journal)
            async with outbox.running():
                await outbox.executor.execute(Emit((1, 2, 3)))
                await journal.calls(before + 3)
                await eventually(lambda outbox=outbox: counters(outbox).succeeded == 3)
        await outbox.close()

    assert about_crashes(wire) == []
    assert await look.fetch("SELECT name FROM {leases} WHERE term <> released_term") == []


@pytest.mark.parametrize("end", ["fails", "takes too long", "is interrupted"])
async def test_a_finished_run_of_any_kind_leaves_no_record(make_outbox: MakeOutbox, look: Look, end: str) -> None:
    outbox = await make_outbox(settings=Settings(shutdown_timeout="50ms", purge_enabled=False))
    gate = Gate()

    @outbox.handler(MoneyDeposited, name="mail", timeout="100ms" if end == "takes too long" else "1m")
    async def mail(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if end == "fails":
            raise ValueError("it fails")
        await gate(envelope)

    await die(look, "mail")
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        if end == "is interrupted":
            await gate.calls(1)
            assert await records(look) == 1
        else:
            await eventually(lambda: counters(outbox).failed == 1)

    assert await records(look) == 0
    (row,) = await outbox.admin.list()
    assert (row.state, row.attempts) == (("PENDING", 0) if end == "is interrupted" else ("FAILED", 1))


@needs_asyncpg
async def test_recording_stops_once_all_possible_suspects_are_through(
    wire: Wire, make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    outbox = await make_outbox(settings=QUICK, clock=clock)
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await die(look, "mail")
    async with outbox.running():
        await deposits(outbox, 3)
        await journal.calls(3)
        await eventually(lambda: counters(outbox).succeeded == 3)
        assert recorded_by(wire)
        clock.advance("2s")
        await eventually(lambda: not poison_guard_of(outbox).is_active)
        before = len(about_crashes(wire))
        await deposits(outbox, 3)
        await journal.calls(6)
        await eventually(lambda: counters(outbox).succeeded == 6)

    assert len(about_crashes(wire)) == before


# --- suspects ------------------------------------------------------------------------------------


async def test_suspects_run_alone_and_the_others_together(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    suspects = {1, 4, 5}
    others = {*range(12)} - suspects
    journal = Alone([], dict.fromkeys(others, asyncio.Barrier(len(others))))  # the records may be written separately
    outbox.handler(MoneyDeposited, name="mail")(journal)
    await insert_notifications(outbox, 12)
    await suspect(outbox, "mail", *suspects)
    await die(look, "mail")

    assert (await outbox.drain()).succeeded == 12

    assert {amount for amount, beside in journal.beside.items() if not beside} == suspects
    assert len(journal) == 12
    assert await records(look) == 0


async def test_suspects_of_a_process_run_one_at_a_time(make_outbox: MakeOutbox, look: Look) -> None:
    inside: list[int] = []
    outboxes = {namespace: await make_outbox(namespace, settings=QUICK) for namespace in ("app", "other")}
    journals = [Alone(inside) for _ in range(4)]
    for outbox, (first, second) in zip(outboxes.values(), (journals[:2], journals[2:]), strict=True):
        outbox.handler(MoneyDeposited, name="mail")(first)
        outbox.handler(MoneyDeposited, name="ledger", ordered=True)(second)
        await insert_notifications(outbox, 3)
        for name in ("mail", "ledger"):
            await suspect(outbox, name, 0, 1, 2)
        await die(look, "mail", "ledger", namespace=outbox.namespace)

    async with outboxes["app"].running(), outboxes["other"].running():
        await eventually(lambda: sum(len(journal) for journal in journals) == 12)
        await eventually(lambda: all(counters(outbox).succeeded == 6 for outbox in outboxes.values()))

    assert [beside for journal in journals for beside in journal.beside.values()] == [set()] * 12
    assert await records(look) == 0


async def test_each_suspect_of_a_batch_handler_runs_alone(make_outbox: MakeOutbox, look: Look) -> None:
    """The suspect waits for no other rows to fill its call, and other rows do not wait for a suspect."""
    outbox = await make_outbox(settings=QUICK)
    calls: list[list[int]] = []

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=50, max_wait="1m"))
    async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        calls.append([int(envelope.event.amount) for envelope in envelopes])

    await insert_notifications(outbox, 10)
    await suspect(outbox, "report", 2, 7)
    await die(look, "report")
    async with outbox.running():
        await eventually(lambda: counters(outbox).succeeded == 2)
    assert (await outbox.drain()).succeeded == 8

    assert calls == [[2], [7], [0, 1, 3, 4, 5, 6, 8, 9]]


# --- the outcome ---------------------------------------------------------------------------------

Options = dict[str, Any]


@pytest.mark.parametrize(
    "options", [{}, {"delivery": "transactional"}, {"ordered": True}, {"batch": Batch()}], ids=lambda o: str([*o])
)
async def test_a_row_started_too_often_is_dead_without_another_call(
    outbox: Outbox, look: Look, options: Options
) -> None:
    called: list[int] = []
    buried: list[tuple[int, HandlerFailed]] = []

    async def bury(envelope: EventEnvelope[MoneyDeposited], error: HandlerFailed) -> None:
        buried.append((int(envelope.event.amount), error))

    async def handle(given: Any) -> None:
        envelopes = given if isinstance(given, list) else [given]
        called.extend(int(envelope.event.amount) for envelope in envelopes)

    outbox.handler(MoneyDeposited, name="mail", on_dead=bury, **options)(handle)
    await insert_notifications(outbox, 3)
    await suspect(outbox, "mail", 1, starts=3)
    await die(look, "mail")
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead, sorted(called)) == (2, 1, [0, 2])
    (dead,) = await outbox.admin.list(state="DEAD")
    assert (dead.model_id, dead.attempts, dead.errors[-1]["type"]) == ("1", 1, "CrashedProcess")
    assert "fix it, then retry or skip the notification" in str(dead.errors[-1]["message"])
    ((amount, error),) = buried
    assert (amount, error.type) == (1, "CrashedProcess")
    assert await records(look) == 0


@pytest.mark.parametrize(
    ("most", "starts", "is_dead"),
    [(1, 1, False), (1, 2, True), (2, 2, True), (3, 2, False), (5, 4, False), (5, 5, True)],
)
async def test_the_limit_of_starts_is_a_setting(
    make_outbox: MakeOutbox, look: Look, most: int, starts: int, is_dead: bool
) -> None:
    """Other runs may have been in progress during the first counted start, so one start is never sufficient."""
    outbox = await make_outbox(settings=Settings(max_crashes=most))
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await insert_notifications(outbox, 1)
    await suspect(outbox, "mail", 0, starts=starts)
    await die(look, "mail")
    drained = await outbox.drain()

    assert (drained.dead, len(journal)) == ((1, 0) if is_dead else (0, 1))


async def test_a_start_is_counted_before_the_call(outbox: Outbox, look: Look) -> None:
    seen: list[Any] = []

    @outbox.handler(MoneyDeposited, name="mail")
    async def mail(envelope: EventEnvelope[MoneyDeposited]) -> None:
        seen.extend(row["starts"] for row in await look.fetch("SELECT starts FROM {started_runs}"))

    await insert_notifications(outbox, 1)
    await suspect(outbox, "mail", 0, starts=2)
    await die(look, "mail")
    await outbox.drain()

    assert seen == [3]


async def test_a_hook_started_too_often_is_abandoned(outbox: Outbox, look: Look) -> None:
    called = Journal()

    async def bury(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        await called(envelope)

    outbox.handler(MoneyDeposited, name="mail", on_dead=bury)(called)
    await insert_notifications(outbox, 1)
    await suspect(outbox, "mail", 0, starts=3)
    await look.fetch("UPDATE {event_notifications} SET state = 'DYING', attempts = 4")
    await die(look, "mail")

    assert ((await outbox.drain()).dead, len(called)) == (1, 0)
    (dead,) = await outbox.admin.list(state="DEAD")
    assert (dead.attempts, dead.errors[-1]["type"]) == (4, "CrashedProcess")


async def test_records_that_a_former_process_kept_are_removed(make_outbox: MakeOutbox, look: Look) -> None:
    """Its run had finished, and the outcome was written; the record was to be removed with the next ones."""
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await insert_notifications(outbox, 2)
    await suspect(outbox, "mail", 0)
    await look.fetch("UPDATE {event_notifications} SET state = 'SUCCEEDED' WHERE model_id = '0'")
    await die(look, "mail")
    await outbox.drain()

    assert (journal.amounts, await records(look)) == ([1], 0)


async def test_a_suspect_that_fails_is_retried_like_any_other(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)
    journal = Journal(lambda envelope: ValueError("once") if envelope.attempt == 1 else None)
    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="10s", jitter=0))(journal)
    await insert_notifications(outbox, 1)
    await suspect(outbox, "mail", 0, starts=2)
    await die(look, "mail")
    assert (await outbox.drain()).failed == 1
    assert await records(look) == 0

    clock.advance("1m")
    assert (await outbox.drain()).succeeded == 1


async def test_an_at_most_once_run_has_its_mark_and_no_record(wire: Wire, outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="once", delivery="at_most_once")(journal := Journal())
    await insert_notifications(outbox, 3)
    await look.fetch("UPDATE {event_notifications} SET attempts = 1 WHERE model_id = '1'")
    await die(look, "once")
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead, sorted(journal.amounts)) == (2, 1, [0, 2])
    assert recorded_by(wire) == []


Operate = Callable[[Outbox, Any], Awaitable[Any]]


async def skip(outbox: Outbox, row: Any) -> None:
    await outbox.admin.skip([row.id])


async def unsubscribe(outbox: Outbox, row: Any) -> None:
    await outbox.admin.unsubscribe(row.handler_name)


@pytest.mark.parametrize("operate", [skip, unsubscribe])
async def test_operations_on_suspects_apply(outbox: Outbox, look: Look, operate: Operate) -> None:
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await insert_notifications(outbox, 2)
    await suspect(outbox, "mail", 0)
    (row,) = [row for row in await outbox.admin.list() if row.model_id == "0"]
    await operate(outbox, row)
    await die(look, "mail")
    drained = await outbox.drain()

    assert drained.succeeded == len(journal) == (1 if operate is skip else 2)
    await outbox.admin.purge()
    assert await records(look) == 0


async def test_a_retry_or_replay_of_a_poison_event_resets_its_count(make_outbox: MakeOutbox, look: Look) -> None:
    """Even if the process died before the record was removed."""
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await insert_notifications(outbox, 2)
    runs = [StartedRun(row.id, "mail", 3) for row in await outbox.admin.list()]
    await look.fetch("UPDATE {event_notifications} SET state = 'DEAD'")
    rows = {row.model_id: row for row in await outbox.admin.list()}
    await database_of(outbox).starts.record("app", runs, rows["0"].updated_date)
    await outbox.admin.retry([rows["0"].id])
    await outbox.admin.replay("mail", since=rows["1"].event_date, states=["DEAD"])
    await die(look, "mail")

    assert (await outbox.drain()).succeeded == len(journal) == 2
    await outbox.admin.purge()
    assert await records(look) == 0


async def test_a_pause_applies_to_suspects_too(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    await insert_notifications(outbox, 2)
    await suspect(outbox, "mail", 0)
    await die(look, "mail")
    await outbox.admin.pause("mail")
    assert (await outbox.drain()).succeeded == len(journal) == 0

    await outbox.admin.unpause("mail")
    assert (await outbox.drain()).succeeded == 2


async def test_a_run_does_not_start_if_it_cannot_be_recorded(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    starts, failing = database_of(outbox).starts, [True]
    record = starts.record

    async def fail(*args: Any) -> None:
        if failing:
            raise ConnectionResetError(f"{failing.pop()}: the connection broke")
        await record(*args)

    starts.record = fail  # type: ignore[method-assign]
    await insert_notifications(outbox, 1)
    await die(look, "mail")
    assert ((await outbox.drain()).failed, len(journal)) == (1, 0)
    (row,) = await outbox.admin.list()
    assert (row.state, row.attempts, row.errors[-1]["type"]) == ("FAILED", 0, "HandlerNotStarted")

    clock.advance("5s")
    assert (await outbox.drain()).succeeded == 1


async def test_a_failed_removal_at_shutdown_is_not_a_lost_outcome(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher, "LONGEST_GRACE", 0.2)
    outbox = await make_outbox(settings=Settings(shutdown_timeout="200ms"))
    journal = Journal()
    outbox.handler(MoneyDeposited, name="mail")(journal)
    await insert_notifications(outbox, 1)
    await die(look, "mail")
    await suspect(outbox, "mail", 0)
    starts = watch(outbox, "starts")
    starts.trouble["remove"] = breaks(1_000_000)

    async with outbox.running():
        await journal.calls(1)
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert "could not delete the start records of finished runs" in caplog.text
    assert await look.states() == {"SUCCEEDED": 1}
