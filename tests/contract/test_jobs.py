"""Jobs: one run in the cluster per scheduled time, on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Job, Outbox, RegistrationError, RetryPolicy, Transaction
from outboxio.cli.commands.jobs import JobOperations
from outboxio.cli.commands.jobs import jobs as jobs_command
from outboxio.cli.commands.operations import OutputFormat
from outboxio.model.operating.operation import JobRow
from outboxio.testing import MovableClock, emitted, run_job
from tests.kit.app import MoneyDeposited, eventually, hang
from tests.kit.probes import MakeOutbox

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

NOON = datetime(2030, 1, 1, 12)
MINUTE = timedelta(minutes=1)


async def row(outbox: Outbox, name: str = "tick") -> JobRow | None:
    return next((job for job in await outbox.admin.jobs() if job.name == name), None)


async def until(outbox: Outbox, holds: Callable[[JobRow], bool], name: str = "tick") -> JobRow:
    """The row of a job as soon as the condition holds."""
    found: JobRow | None = None

    async def looks() -> bool:
        nonlocal found
        found = await row(outbox, name)
        return found is not None and holds(found)

    await eventually(looks, timeout=60)
    assert found is not None
    return found


async def declared(outbox: Outbox, name: str = "tick") -> JobRow:
    return await until(outbox, lambda _: True, name)


async def test_a_job_runs_once_for_its_scheduled_time_without_any_handler(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox, runs = await make_outbox(clock=clock), list[Job]()

    @outbox.job("tick", every=MINUTE)
    async def tick(job: Job) -> None:
        runs.append(job)

    async with outbox.running():
        assert (await declared(outbox)).next_date == NOON + MINUTE
        clock.advance(MINUTE)
        done = await until(outbox, lambda job: job.succeeded == 1)
    assert [(run.name, run.scheduled_at, run.attempt) for run in runs] == [("tick", NOON + MINUTE, 1)]
    assert (done.result, done.state, done.missed, done.next_date) == ("SUCCEEDED", "WAITING", 0, NOON + 2 * MINUTE)


@pytest.mark.parametrize(("catch_up", "ran"), [(False, 0), (True, 1)])
async def test_missed_times_are_skipped_or_caught_up_once(
    make_outbox: MakeOutbox, clock: MovableClock, catch_up: bool, ran: int
) -> None:
    outbox, runs = await make_outbox(clock=clock), list[datetime]()

    @outbox.job("tick", every="1h", catch_up=catch_up)
    async def tick(job: Job) -> None:
        runs.append(job.scheduled_at)

    async with outbox.running():
        await declared(outbox)
        clock.advance(timedelta(hours=3, minutes=30))
        found = await until(outbox, lambda job: job.next_date == NOON + timedelta(hours=4) and job.state == "WAITING")
    assert (found.missed, runs) == (3 - ran, [NOON + timedelta(hours=3)] * ran)


async def test_the_effects_of_a_job_commit_with_its_record(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, fails = await make_outbox(clock=clock), [True]

    @outbox.job("tick", every=MINUTE, retry=RetryPolicy(max_attempts=2, base="1s", jitter=0))
    async def tick(job: Job, tx: Transaction) -> None:
        assert job.tx is tx
        tx.emit(MoneyDeposited(uuid4(), Decimal(job.attempt)))
        if fails.pop() if fails else False:
            raise ValueError("the first attempt fails")

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        failed = await until(outbox, lambda job: job.state == "RETRYING")
        assert failed.result == "FAILED"
        assert "the first attempt fails" in str(failed.error)
        clock.advance(timedelta(seconds=2))
        done = await until(outbox, lambda job: job.succeeded == 1)
    assert (done.failed, done.attempts, done.moment_date) == (1, 2, NOON + MINUTE)
    payloads = await outbox.admin.payloads(["MoneyDeposited"])
    assert len(payloads) == 1


async def test_a_job_past_its_timeout_is_cancelled(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)

    @outbox.job("tick", every=MINUTE, timeout="50ms")
    async def tick() -> None:
        await hang()

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        found = await until(outbox, lambda job: job.failed == 1)
    assert found.result == "TIMED_OUT"
    assert str(found.error).startswith("TimeoutError: job 'tick' ran longer than its timeout of 0.05 s")
    assert "in tick" in str(found.error)


async def test_a_job_that_returns_after_its_cancellation_has_failed(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)

    async def ignores() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            return

    @outbox.job("tick", every=MINUTE, timeout="50ms")
    async def tick() -> None:
        await ignores()

    @outbox.job("tock", every=MINUTE, timeout="50ms")
    async def tock(tx: Transaction) -> None:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
        await ignores()

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        for name in ("tick", "tock"):
            assert (await until(outbox, lambda job: job.failed == 1, name)).result == "TIMED_OUT"
    assert await outbox.admin.payloads(["MoneyDeposited"]) == []


async def test_an_operator_pauses_a_job_and_runs_it_now(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, runs = await make_outbox(clock=clock), list[datetime]()

    @outbox.job("tick", every=MINUTE)
    async def tick(job: Job) -> None:
        runs.append(job.scheduled_at)

    async with outbox.running():
        await declared(outbox)
        assert await outbox.admin.pause_job("tick")
        assert not await outbox.admin.pause_job("tick")
        clock.advance(MINUTE)
        await until(outbox, lambda job: job.next_date == NOON + 2 * MINUTE)
        assert runs == []
        await outbox.admin.run_job_now("tick")
        await until(outbox, lambda job: job.succeeded == 1)
        assert await outbox.admin.unpause_job("tick")
        clock.advance(MINUTE)
        await until(outbox, lambda job: job.succeeded == 2)
    assert runs == [NOON + MINUTE, NOON + 2 * MINUTE]
    with pytest.raises(ConfigurationError, match="no job is named 'tock'; the jobs of this namespace are 'tick'"):
        await outbox.admin.pause_job("tock")


async def test_run_now_during_a_run_starts_another_run_afterwards(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, started, free = await make_outbox(clock=clock), list[datetime](), asyncio.Event()

    @outbox.job("tick", every=MINUTE)
    async def tick(job: Job) -> None:
        started.append(job.scheduled_at)
        await free.wait()

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        before = await until(outbox, lambda job: job.state == "RUNNING")
        await outbox.admin.run_job_now("tick")
        ordered = await until(outbox, lambda job: job.ordered_date is not None)
        assert (ordered.state, ordered.due_date, ordered.term) == ("RUNNING", before.due_date, before.term)
        free.set()
        done = await until(outbox, lambda job: job.succeeded == 2)
    assert (started, done.ordered_date, done.next_date) == ([NOON + MINUTE] * 2, None, NOON + 2 * MINUTE)


async def test_a_jobs_row_can_be_removed_and_is_inserted_again(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, free = await make_outbox(clock=clock), asyncio.Event()

    @outbox.job("tick", every=MINUTE)
    async def tick() -> None:
        await free.wait()

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        await until(outbox, lambda job: job.state == "RUNNING")
        with pytest.raises(ConfigurationError, match="job 'tick' is running and cannot be removed"):
            await outbox.admin.remove_job("tick")
        free.set()
        await until(outbox, lambda job: job.succeeded == 1)
        await outbox.admin.remove_job("tick")
        assert await outbox.admin.jobs() == []
        clock.advance(MINUTE)
        assert (await declared(outbox)).succeeded == 0
    await outbox.admin.remove_job("tick")
    assert await outbox.admin.jobs() == []


async def test_the_command_line_lists_and_operates_jobs(
    make_outbox: MakeOutbox, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = await make_outbox(clock=clock)

    @outbox.job("tick", every=MINUTE)
    async def tick() -> None:
        raise ValueError("no mail server")

    async with outbox.running():
        await declared(outbox)
        await jobs_command(outbox, JobOperations(pause="tick", run="tick"), OutputFormat(reason="a test"))
        await until(outbox, lambda job: job.failed == 1)
        capsys.readouterr()
        await jobs_command(outbox, JobOperations(), OutputFormat())
        output = capsys.readouterr().out
        assert all(text in output for text in ("tick", "every 60 s", "PAUSED", "FAILED", "ValueError: no mail server"))
        await jobs_command(outbox, JobOperations(unpause="tick"), OutputFormat(as_json=True))
        assert '"paused_date": null' in capsys.readouterr().out
        await jobs_command(outbox, JobOperations(pause="tick"), OutputFormat(dry_run=True))
        assert "would pause tick in all processes" in capsys.readouterr().out
        with pytest.raises(ConfigurationError, match="no job is named 'tock'"):
            await jobs_command(outbox, JobOperations(remove="tock"), OutputFormat(dry_run=True))
    operations = [(one.kind, one.origin, one.reason) for one in reversed(await outbox.admin.operations())]
    assert operations == [
        ("pause_job", "cli", "a test"), ("run_job_now", "cli", "a test"), ("unpause_job", "cli", None),
    ]  # fmt: skip


async def test_operations_on_jobs_are_recorded_unless_refused(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)

    @outbox.job("tick", every=MINUTE)
    async def tick() -> None: ...

    async with outbox.running():
        await declared(outbox)
    admin = outbox.admin.by("ada", origin="dashboard")
    await admin.pause_job("tick", reason="the ledger is locked")
    assert not await admin.pause_job("tick", actor="bob")
    await admin.remove_job("tick")
    with pytest.raises(ConfigurationError, match="no job is named 'tick'"):
        await admin.run_job_now("tick")
    output = [
        (operation.kind, operation.state, operation.actor, operation.origin, operation.reason, operation.request)
        for operation in reversed(await outbox.admin.operations())
    ]
    request = {"job": "tick"}
    assert output == [
        ("pause_job", "DONE", "ada", "dashboard", "the ledger is locked", request),
        ("pause_job", "DONE", "bob", "dashboard", None, request),
        ("remove_job", "DONE", "ada", "dashboard", None, request),
    ]


async def test_two_processes_run_each_scheduled_time_once(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    runs = list[datetime]()

    async def process(*further: str) -> Outbox:
        outbox = await make_outbox(clock=clock)

        @outbox.job("tick", every=MINUTE)
        async def tick(job: Job) -> None:
            runs.append(job.scheduled_at)

        for name in further:
            outbox.job(name, every=MINUTE)(tick_not)
        return outbox

    async def tick_not() -> None: ...

    one, two = await process(), await process("tock")  # different jobs, so that both hold a lock
    async with one.running():
        await declared(one)
        async with two.running():
            await declared(two, "tock")
            for number in range(1, 4):
                clock.advance(MINUTE)
                await until(one, lambda job, number=number: job.succeeded == number)  # type: ignore[misc]
                await until(two, lambda job, number=number: job.succeeded == number, "tock")  # type: ignore[misc]
    assert runs == [NOON + number * MINUTE for number in range(1, 4)]


class Mailer:
    """A resource."""


async def test_a_test_runs_a_job_directly_and_gets_its_error(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, seen = await make_outbox(clock=clock, resources={Mailer: (mailer := Mailer())}), list[object]()

    @outbox.job("tick", every=MINUTE)
    async def tick(job: Job, tx: Transaction, mailer: Mailer) -> None:
        seen.append((job.scheduled_at, job.attempt, mailer))
        tx.emit(MoneyDeposited(uuid4(), Decimal(job.attempt)))
        if job.attempt == 2:
            raise ValueError("no mail server")

    @outbox.job("slow", every=MINUTE, timeout="50ms")
    async def slow(job: Job, tx: Transaction) -> None:
        tx.emit(MoneyDeposited(uuid4(), Decimal(3)))
        await hang()

    await run_job(outbox, "tick")
    with pytest.raises(ValueError, match="no mail server"):
        await run_job(outbox, "tick", scheduled_at=NOON + MINUTE, attempt=2)
    with pytest.raises(TimeoutError, match=r"job 'slow' ran longer than its timeout of 0.05 s"):
        await run_job(outbox, "slow")
    with pytest.raises(ConfigurationError, match="no job is named 'tock'; the jobs of this outbox are 'tick', 'slow'"):
        await run_job(outbox, "tock")
    assert seen == [(NOON, 1, mailer), (NOON + MINUTE, 2, mailer)]
    assert [event.amount for event in await emitted(outbox, MoneyDeposited)] == [1]
    assert await outbox.admin.jobs() == []


async def test_a_commit_before_the_timeout_is_a_success_in_tests_too(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Transaction.commit

    async def commit_late(tx: Transaction, *args: Any) -> None:
        await commit(tx, *args)
        raise TimeoutError

    @outbox.job("tick", every=MINUTE)
    async def tick(tx: Transaction) -> None:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))

    monkeypatch.setattr(Transaction, "commit", commit_late)
    await run_job(outbox, "tick")
    assert len(await emitted(outbox, MoneyDeposited)) == 1


async def test_drain_runs_no_job(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, runs = await make_outbox(clock=clock), list[int]()

    @outbox.job("tick", every=MINUTE)
    async def tick() -> None:
        runs.append(1)

    async with outbox.running():
        await declared(outbox)
    clock.advance(MINUTE)
    await outbox.drain()
    assert runs == []


async def test_leaving_waits_for_a_job_run(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, started = await make_outbox(clock=clock), asyncio.Event()

    @outbox.job("tick", every=MINUTE)
    async def tick(job: Job) -> None:
        started.set()
        await job.stopping.wait()

    async with outbox.running():
        await declared(outbox)
        clock.advance(MINUTE)
        await eventually(started.is_set)
    found = await row(outbox)
    assert found is not None
    assert (found.result, found.succeeded) == ("SUCCEEDED", 1)


# --- scheduled times and registration ----------------------------------------------------------------


def test_a_cron_schedule_follows_daylight_saving_changes() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    @outbox.job("night", schedule="30 2 * * *", timezone="Europe/Berlin")
    async def night() -> None: ...

    next_after = outbox._jobs["night"].next_after
    # The clock jumps from 2:00 to 3:00 on 2026-03-29: the job runs right after the gap, and once.
    spring = [datetime(2026, 3, 28, 12)]
    autumn = [datetime(2026, 10, 24, 12)]
    for times in (spring, autumn):
        for _ in range(2):
            times.append(next_after(times[-1]))
    assert spring[1:] == [datetime(2026, 3, 29, 1), datetime(2026, 3, 30, 0, 30)]
    assert autumn[1:] == [datetime(2026, 10, 25, 0, 30), datetime(2026, 10, 26, 1, 30)]


def test_periodic_times_do_not_drift() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    @outbox.job("often", every="7s", jitter="2s")
    async def often() -> None: ...

    spec = outbox._jobs["often"]
    first = spec.next_after(NOON)
    assert spec.next_after(first + timedelta(seconds=3)) - first == timedelta(seconds=7)
    assert timedelta() <= spec.starts_at(first) - first <= timedelta(seconds=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither of schedule and every"),
        ({"schedule": "* * * * *", "every": "1m"}, "both of schedule and every"),
        ({"schedule": "61 * * * *"}, "schedule is '61 \\* \\* \\* \\*'; expected a cron expression"),
        ({"schedule": "* * * * * *"}, "expected a cron expression of five fields"),
        ({"schedule": "0 0 30 2 *"}, "for a date that exists"),
        ({"schedule": "* * * * *", "timezone": "Mars/Base"}, "timezone is 'Mars/Base'"),
        ({"every": "10ms"}, "expected at least 1 s"),
    ],
)
def test_an_invalid_job_is_refused(options: dict[str, str], message: str) -> None:
    async def function() -> None: ...

    with pytest.raises(RegistrationError, match=message):
        Outbox("sqlite://", namespace="app").job("job", **options)(function)  # type: ignore[arg-type]


def test_uncallable_functions_and_duplicate_names_are_refused() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    async def needs(mailer: str) -> None: ...
    async def works() -> None: ...

    with pytest.raises(RegistrationError, match="unknown parameter 'mailer'"):
        outbox.job("needs", every="1m")(needs)
    with pytest.raises(RegistrationError, match="is not async"):
        outbox.job("plain", every="1m")(lambda: None)  # type: ignore[type-var]
    outbox.job("works", every="1m")(works)
    with pytest.raises(RegistrationError, match="job name 'works' is registered twice"):
        outbox.job("works", every="1m")(works)
